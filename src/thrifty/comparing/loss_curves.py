"""Held-out loss of a run over its steps and seconds."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

LossCurve = Sequence[Sequence[float | None]]
"""Rows of step, seconds and held-out loss. A loss is None if the evaluation failed."""


def seconds_to_loss(curve: LossCurve, loss: float) -> float | None:
    """Return the seconds until the curve reaches the held-out loss `loss`, interpolated linearly between evaluations;
    None if the curve never reaches it.
    """
    return _crossing(((seconds, value) for _, seconds, value in curve), loss)


def steps_to_loss(curve: LossCurve, loss: float) -> float | None:
    """Return the steps until the curve reaches the held-out loss `loss`, like `seconds_to_loss`."""
    return _crossing(((step, value) for step, _, value in curve), loss)


def slope_at_end(curve: LossCurve) -> float:
    """Return the decrease of the held-out loss when the budget grows by a factor of e. The decrease is measured over
    the second half of the run. This overestimates the decrease, because the loss falls faster within a run than final
    losses fall with the budget. With a single evaluation, the result is the loss itself.
    """
    points = [(step, loss) for step, _, loss in curve if step and loss is not None]
    if not points:
        return 0.0
    end, last = points[-1]
    start, first = min(points, key=lambda point: abs(point[0] - end / 2))
    return abs(first - last) / math.log(end / start) if start < end else abs(last)


def _crossing(points: Iterable[tuple[float | None, float | None]], loss: float) -> float | None:
    known = [(place, value) for place, value in points if place is not None and value is not None]
    if known and known[0][1] <= loss:
        return known[0][0]
    for (earlier, high), (later, low) in pairwise(known):
        if low <= loss:
            return earlier + (later - earlier) * (high - loss) / (high - low)
    return None
