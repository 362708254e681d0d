"""Cost estimates of a run: counted memory footprints, and step times from probes, with intervals."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from thrifty.composition.compose import Run
from thrifty.composition.explain import count
from thrifty.composition.micro_batches import data_shard_count
from thrifty.core.footprint import Footprint
from thrifty.core.technique import Technique

COUNTED_HIGH = 1.1
"""Upper bound of measured memory / counted memory. In 268 cases, the error was at most 9.4 % (results/benchmarks)."""
OVER_MESH_HIGH = 1.2
"""Upper bound of measured memory / counted memory over a mesh. In 26 small cases on two gloo ranks, measured
memory was at most 1.8 % above counted memory. The bound is larger, because techniques estimate communication buffers,
which are not counted. GPUs and many ranks were not measured."""
HELD = ("parameters", "gradients", "optimizer", "activations", "temporary", "buffers")
DISTURBED = 0.1
"""Maximum fraction of cores that other processes may use. Above it, a measurement counts as disturbed."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, below: float, above: float) -> Self:
        """Return an estimate with the bounds `value` · `below` and `value` · `above`."""
        return cls(value, value * below, value * above)

    def times(self, factor: float) -> "Estimate":
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, amount: float) -> "Estimate":
        return Estimate(self.value + amount, self.low + amount, self.high + amount)

    def over(self, amount: float) -> "Estimate":
        """Return `amount` divided by the estimate, with its interval."""
        return Estimate(amount / self.value, amount / self.high, amount / self.low)

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def count_footprint(run: Run) -> Footprint:
    """Return the footprint of a run with all techniques, as in the last row of `thrifty explain`."""
    claiming = [t for t in run.techniques if type(t).footprint is not Technique.footprint]
    _, footprint = count(run, tuple(t for t in run.techniques if t not in claiming), data_shard_count(run.techniques))
    for technique in claiming:
        footprint = technique.footprint(footprint)
    return footprint


def largest_part(footprint: Footprint) -> tuple[str, float]:
    """Return the name of the largest part of the predicted peak, and its fraction of the peak.

    Gradients are allocated while activations are freed, so only the larger of both counts.
    """
    smaller = "gradients" if footprint.activations >= footprint.gradients else "activations"
    parts = {name: getattr(footprint, name) for name in HELD if name != smaller}
    name = max(parts, key=lambda part: parts[part])
    return name, parts[name] / max(footprint.memory, 1.0)


def interpolate_footprint(one: Footprint, other: Footprint, share: float) -> Footprint:
    """Interpolate linearly between the footprints `one` (share 0) and `other` (share 1)."""
    ends = ((field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(Footprint))
    return Footprint(**{name: first + share * (last - first) for name, first, last in ends})


@dataclass(frozen=True)
class StepTiming:
    """Seconds of training steps, and peak memory in bytes, measured in a separate process.

    A step is forward and backward passes of micro-batches, then the update. Micro-batches of several sizes are timed.
    """

    rows: tuple[int, ...]
    """Numbers of examples per micro-batch, ascending. Slow candidates have only the largest size."""
    passes: tuple[float, ...]
    """Median seconds of forward and backward pass, by micro-batch size. A run is expected to take this time."""
    least: tuple[float, ...]
    """Minimum seconds of forward and backward pass, by micro-batch size. Candidates are compared by the minimum,
    because other processes only add time."""
    update: float
    spread: float
    """Half the interquartile range of step times, divided by the median."""
    startup: float
    """Seconds from building the model to the end of the first step, plus seconds of the first evaluated batch.
    Both include compilation."""
    evaluation: float
    save: float
    memory: float
    """Peak memory with micro-batches of the largest size, minus the process memory before the model was built."""
    others: float = 0.0
    """Number of cores used by other processes during the measurement."""
    cores: int = 1
    """Number of cores of the machine."""
    process: float = 0.0
    """Bytes of the process before the model was built; on a CPU only."""

    @property
    def is_disturbed(self) -> bool:
        """True if other processes used so many cores that the steps were slowed down."""
        return self.others > DISTURBED * self.cores

    def step(self, batch: int, parts: int) -> float:
        """Return the median seconds of a step of `batch` examples in `parts` micro-batches."""
        return self._step(batch, parts, self.passes)

    def least_step(self, batch: int, parts: int) -> float:
        """Return the minimum seconds of a step of `batch` examples in `parts` micro-batches."""
        return self._step(batch, parts, self.least)

    def _step(self, batch: int, parts: int, passes: tuple[float, ...]) -> float:
        rows = -(-batch // parts)
        whole, rest = divmod(batch, rows)
        once = line_through(self.rows, passes)
        return whole * once(rows) + (once(rest) if rest else 0.0) + self.update

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def line_through(rows: Sequence[int], seconds: Sequence[float]) -> Callable[[int], float]:
    """Return a function from micro-batch size to seconds. At the sizes `rows` it returns the measured `seconds`, at
    other sizes their least-squares line.

    If noise makes the slope or the intercept negative, the time of the largest size is scaled in proportion.
    """
    slope, fixed = np.polyfit(rows, seconds, 1) if len(rows) > 1 else (0.0, 0.0)

    def seconds_of(size: int) -> float:
        if size in rows:
            return seconds[rows.index(size)]
        if slope <= 0 or fixed < 0:
            return seconds[-1] * size / rows[-1]
        return float(fixed + slope * size)

    return seconds_of
