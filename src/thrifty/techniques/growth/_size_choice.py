"""Selection of a model size by the losses and times of several tried sizes."""

import math
from collections.abc import Sequence


def sizes_up(fraction: float, count: int) -> list[float]:
    """Return the size fractions to try: at most `count`, in equal steps down from min(2 · fraction, 1) to
    `fraction`."""
    largest = min(2 * fraction, 1.0)
    steps = [largest - index * (largest - fraction) / max(count - 1, 1) for index in range(count)]
    return list(dict.fromkeys(steps))


def fitted_weight(losses: Sequence[float], times: Sequence[float]) -> float:
    """Fit the power law loss ~ time^-w by least squares of logarithms, and return w; 0 if the loss does not fall."""
    x, y = [math.log(time) for time in times], [math.log(loss) for loss in losses]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((each - mean_x) ** 2 for each in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    return max(0.0, -slope)


def best_size(losses: Sequence[float], times: Sequence[float], weight: float) -> int:
    """Return the index of the lowest loss · time^weight; the first index if several are equal."""
    scores = [math.log(loss) + weight * math.log(time) for loss, time in zip(losses, times, strict=True)]
    return scores.index(min(scores))
