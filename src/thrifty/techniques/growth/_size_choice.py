"""Which of several sizes of a model to train on with, from what was seen of each."""

import math
from collections.abc import Sequence


def sizes_up(share: float, count: int) -> list[float]:
    """`count` shares from this one to its double, at most 1, the largest first; with a count of 1 the largest alone."""
    most = min(2 * share, 1.0)
    steps = [most - index * (most - share) / max(count - 1, 1) for index in range(count)]
    return list(dict.fromkeys(steps))


def fitted_weight(losses: Sequence[float], times: Sequence[float]) -> float:
    """w of the power law loss ~ time^-w through these points, by least squares of their logarithms; 0 where more time
    does not lower the loss."""
    x, y = [math.log(time) for time in times], [math.log(loss) for loss in losses]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - middle_x) ** 2 for each in x)
    slope = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    return max(0.0, -slope)


def best_size(losses: Sequence[float], times: Sequence[float], weight: float) -> int:
    """The index with the lowest loss · time^weight; of equals the first."""
    worth = [math.log(loss) + weight * math.log(time) for loss, time in zip(losses, times, strict=True)]
    return worth.index(min(worth))
