"""Curves of a run: from one value per step to what an eye or a table can take in, without hiding a spike."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from thrifty.reporting.run_record import number


class CurvePoint(NamedTuple):
    step: int
    value: float


@dataclass(frozen=True)
class CurveSpan:
    """A stretch of steps and what the curve did there."""

    first: int
    last: int
    mean: float
    low: float
    high: float


def curve(records: Iterable[Mapping[str, Any]], field: str) -> list[CurvePoint]:
    """The finite values of one field, in the order of the steps."""
    pairs = ((number(record.get("step")), number(record.get(field))) for record in records)
    return [CurvePoint(int(step), value) for step, value in pairs if step is not None and value is not None]


def thin(points: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """At most `limit` points with both ends and the lowest and highest of every stretch among them.

    limit: at least 4.
    """
    if len(points) <= limit:
        return list(points)
    kept = {points[0], points[-1]}
    for stretch in _stretches(points, (limit - 2) // 2):
        kept.update((min(stretch, key=lambda point: point.value), max(stretch, key=lambda point: point.value)))
    return sorted(kept)


def smooth(points: Sequence[CurvePoint], share: float = 1 / 60) -> list[CurvePoint]:
    """A centred moving mean over about twice `share` of the run; the window shrinks towards the steep beginning.

    Centred, because an exponential average would draw the loss later than it fell.
    """
    reach = int(len(points) * share)
    sums = [0.0, *accumulate(point.value for point in points)]
    smoothed = []
    for index, point in enumerate(points):
        half = min(reach, index)
        first, end = index - half, min(len(points), index + half + 1)
        smoothed.append(CurvePoint(point.step, (sums[end] - sums[first]) / (end - first)))
    return smoothed


def spans(points: Sequence[CurvePoint], limit: int) -> list[CurveSpan]:
    """The curve cut into at most `limit` stretches of equally many points."""
    return [_span(stretch) for stretch in _stretches(points, min(limit, len(points)))]


def _span(stretch: Sequence[CurvePoint]) -> CurveSpan:
    values = [point.value for point in stretch]
    return CurveSpan(stretch[0].step, stretch[-1].step, sum(values) / len(values), min(values), max(values))


def _stretches(points: Sequence[CurvePoint], count: int) -> list[Sequence[CurvePoint]]:
    edges = [index * len(points) // count for index in range(count + 1)] if count else [0]
    return [points[first:end] for first, end in pairwise(edges) if end > first]
