"""Curves of a run: from one value per step to what an eye or a table can take in, without hiding a spike.

A curve grows with the run, and is drawn again without being read again; a hundred thousand steps take milliseconds.
"""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thrifty.reporting.run_record import RunRecord, mapping, number

NOTED = "noise_scale"
STEP_FIELDS = (
    "loss", "learning_rate", "gradient_norm", "tokens_per_second", "flops_per_second", "memory", "skipped", "tokens",
    "seconds", NOTED,
)  # fmt: skip
MEASURES = 64
"""Most columns of evaluations: the losses, and what is measured in addition to them."""


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


class StepColumns:
    """Columns of numbers by step. Of a step that comes twice, as after a resume, the later one counts."""

    def __init__(self, fields: Sequence[str]):
        self.steps = array("q")
        self.columns = {field: array("d") for field in fields}

    def put(self, step: int, record: Mapping[str, Any]) -> None:
        """The fields of one record; what is missing or not a finite number is a gap."""
        steps = self.steps
        is_next = not steps or step > steps[-1]
        place = len(steps) if is_next else bisect_left(steps, step)
        is_again = not is_next and steps[place] == step
        if not is_again:
            steps.insert(place, step)
        for field, column in self.columns.items():
            value = number(record.get(field))
            if is_again:
                column[place] = np.nan if value is None else value
            else:
                column.insert(place, np.nan if value is None else value)

    def add(self, field: str) -> None:
        """Another column, of gaps so far."""
        self.columns[field] = array("d", [np.nan]) * len(self.steps)

    def curve(self, field: str) -> "Curve":
        """The points of a field that are not gaps, as they are now."""
        # copies: an array that is looked at cannot grow
        steps, values = np.array(self.steps, np.int64), np.array(self.columns[field], np.float64)
        there = np.isfinite(values)
        return Curve(steps[there], values[there])


class RunCurves:
    """All curves of a run, of its steps and of its evaluations."""

    def __init__(self) -> None:
        self.steps, self.evaluations = StepColumns(STEP_FIELDS), StepColumns(["loss", "trained_loss"])

    def put(self, record: Mapping[str, Any]) -> None:
        """Add a record of a step or of an evaluation."""
        step = int(record["step"])
        if record["kind"] == "step":
            noted = mapping(record.get("notes")).get(NOTED)
            self.steps.put(step, {**record, NOTED: noted, "skipped": int(record.get("skipped") is True)})
            return
        columns = self.evaluations.columns
        for name, value in record.items():
            if name not in columns and name != "step" and number(value) is not None and len(columns) < MEASURES:
                self.evaluations.add(name)
        self.evaluations.put(step, record)


def curves_of(record: RunRecord) -> RunCurves:
    """Return the curves of a run that was read as a whole."""
    curves = RunCurves()
    for each in (*record.steps, *record.evaluations):
        curves.put(each)
    return curves


class Curve:
    """One field: `steps` (n,) ascending, `values` (n,) finite."""

    def __init__(self, steps: NDArray[np.int64], values: NDArray[np.float64]):
        self.steps, self.values = steps, values

    def __len__(self) -> int:
        return len(self.steps)

    def thin(self, limit: int) -> list[CurvePoint]:
        """Return at most `limit` points with both ends and the lowest and highest of every stretch among them.

        limit: at least 4.
        """
        if len(self) <= limit:
            return self.points
        kept = {0, len(self) - 1}
        for first, end in _stretches(len(self), (limit - 2) // 2):
            stretch = self.values[first:end]
            kept |= {first + int(stretch.argmin()), first + int(stretch.argmax())}
        return self._points(sorted(kept))

    def smooth(self, limit: int, share: float = 1 / 60) -> list[CurvePoint]:
        """Return `limit` points, evenly spread, of a centred moving mean over about twice `share` of the run.

        Centred, because an exponential average would draw the loss later than it fell.
        """
        places = np.unique(np.linspace(0, len(self) - 1, min(limit, len(self))).round().astype(np.int64))
        reach, smoothed = int(len(self) * share), []
        for place in places:
            half = min(reach, place)  # the window shrinks towards the steep beginning
            # a sum of its own: differences of running sums are nothing but rounding after one enormous value
            mean = self.values[place - half : place + half + 1].mean()
            smoothed.append(CurvePoint(int(self.steps[place]), float(mean)))
        return smoothed

    @property
    def last(self) -> float | None:
        return float(self.values[-1]) if len(self) else None

    @property
    def lowest(self) -> float | None:
        return float(self.values.min()) if len(self) else None

    @property
    def median(self) -> float | None:
        return float(np.median(self.values)) if len(self) else None

    def spans(self, limit: int) -> list[CurveSpan]:
        """The curve cut into at most `limit` stretches of equally many points."""
        made = []
        for first, end in _stretches(len(self), min(limit, len(self))):
            stretch = self.values[first:end]
            ends = int(self.steps[first]), int(self.steps[end - 1])
            made.append(CurveSpan(*ends, float(stretch.mean()), float(stretch.min()), float(stretch.max())))
        return made

    @property
    def points(self) -> list[CurvePoint]:
        return self._points(range(len(self)))

    def _points(self, places: Sequence[int]) -> list[CurvePoint]:
        return [CurvePoint(int(self.steps[place]), float(self.values[place])) for place in places]


def _stretches(length: int, count: int) -> list[tuple[int, int]]:
    edges = [index * length // count for index in range(count + 1)] if count else [0]
    return [(first, end) for first, end in pairwise(edges) if end > first]
