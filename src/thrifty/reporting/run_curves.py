"""Curves of a run with one value per step. Thinned or smoothed curves for charts and tables keep their spikes.

New records extend a curve without rereading the file. Processing a hundred thousand steps takes milliseconds.
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
"""Maximum number of evaluation columns for losses and other metrics."""


class CurvePoint(NamedTuple):
    step: float
    """Step, or seconds of training."""
    value: float


@dataclass(frozen=True)
class CurveSpan:
    """Range of steps, with the mean and the extremes of the curve in that range."""

    first: int
    last: int
    mean: float
    low: float
    high: float


class StepColumns:
    """Columns of values by step. If a step is recorded twice, for example after a resume, the later record counts."""

    def __init__(self, fields: Sequence[str]):
        self.steps = array("q")
        self.columns = {field: array("d") for field in fields}

    def put(self, step: int, record: Mapping[str, Any]) -> None:
        """Add the fields of one record. A missing or non-finite value is a gap."""
        steps = self.steps
        is_next = not steps or step > steps[-1]
        index = len(steps) if is_next else bisect_left(steps, step)
        is_again = not is_next and steps[index] == step
        if not is_again:
            steps.insert(index, step)
        for field, column in self.columns.items():
            value = number(record.get(field))
            if is_again:
                column[index] = np.nan if value is None else value
            else:
                column.insert(index, np.nan if value is None else value)

    def add(self, field: str) -> None:
        """Add a column of gaps."""
        self.columns[field] = array("d", [np.nan]) * len(self.steps)

    def curve(self, field: str) -> "Curve":
        """Return a copy of a field's points without gaps."""
        # copy, because an array with an exported buffer cannot grow
        steps, values = np.array(self.steps, np.int64), np.array(self.columns[field], np.float64)
        is_finite = np.isfinite(values)
        return Curve(steps[is_finite], values[is_finite])


class RunCurves:
    """All curves of a run, from its steps and evaluations."""

    def __init__(self) -> None:
        self.steps, self.evaluations = StepColumns(STEP_FIELDS), StepColumns(["loss", "trained_loss"])

    def put(self, record: Mapping[str, Any]) -> None:
        """Add the record of a step or of an evaluation."""
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
    """Return the curves of a run that was read completely."""
    curves = RunCurves()
    for each in (*record.steps, *record.evaluations):
        curves.put(each)
    return curves


class Curve:
    """Curve of one field: ascending steps (n,), or seconds in their place, and finite values (n,)."""

    def __init__(self, steps: NDArray[np.int64] | NDArray[np.float64], values: NDArray[np.float64]):
        self.steps, self.values = steps, values

    def __len__(self) -> int:
        return len(self.steps)

    def thin(self, limit: int) -> list[CurvePoint]:
        """Return at most `limit` points, including both ends of the curve and the extremes of every stretch.

        `limit` must be at least 4.
        """
        if len(self) <= limit:
            return self.points
        selected = {0, len(self) - 1}
        for first, end in _stretches(len(self), (limit - 2) // 2):
            stretch = self.values[first:end]
            selected |= {first + int(stretch.argmin()), first + int(stretch.argmax())}
        return self._points(sorted(selected))

    def smooth(self, limit: int, share: float = 1 / 60) -> list[CurvePoint]:
        """Return `limit` evenly spaced points of a centered moving mean. The window is about twice the fraction `share`
        of the run.

        A centered mean has no lag. An exponential average would show a falling loss too late.
        """
        indices = np.unique(np.linspace(0, len(self) - 1, min(limit, len(self))).round().astype(np.int64))
        reach, smoothed = int(len(self) * share), []
        for index in indices:
            half = min(reach, index)  # the window shrinks towards the steep beginning
            # a direct sum, because differences of running sums are only rounding errors after one huge value
            mean = self.values[index - half : index + half + 1].mean()
            smoothed.append(CurvePoint(self.steps[index].item(), float(mean)))
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
        """Return the curve as at most `limit` stretches with equal numbers of points."""
        spans = []
        for first, end in _stretches(len(self), min(limit, len(self))):
            stretch = self.values[first:end]
            ends = int(self.steps[first]), int(self.steps[end - 1])
            spans.append(CurveSpan(*ends, float(stretch.mean()), float(stretch.min()), float(stretch.max())))
        return spans

    @property
    def points(self) -> list[CurvePoint]:
        return self._points(range(len(self)))

    def _points(self, indices: Sequence[int]) -> list[CurvePoint]:
        return [CurvePoint(self.steps[index].item(), float(self.values[index])) for index in indices]


def _stretches(length: int, count: int) -> list[tuple[int, int]]:
    edges = [index * length // count for index in range(count + 1)] if count else [0]
    return [(first, end) for first, end in pairwise(edges) if end > first]
