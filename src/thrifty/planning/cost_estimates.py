"""What a run will hold and how long it will take: footprints counted, step times from probes, each with an interval."""

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
"""Over 268 cases what was measured was at most 9.4 % from what was counted (results/benchmarks)."""
OVER_MESH_HIGH = 1.2
"""Over meshes of two gloo ranks, 26 small cases, it was at most 1.8 % more and 6.4 % less. What is summed, gathered and
sent is claimed by techniques, and not counted, and neither GPUs nor many ranks were measured: hence the room."""
HELD = ("parameters", "gradients", "optimizer", "activations", "temporary", "buffers")
DISTURBED = 0.1
"""The share of a machine's cores from which on other work counts as a disturbance."""


@dataclass(frozen=True)
class Estimate:
    """A value, and between what bounds it is expected to be found nine times out of ten."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, below: float, above: float) -> Self:
        """By factors, such as 0.9 and 1.1."""
        return cls(value, value * below, value * above)

    def times(self, factor: float) -> "Estimate":
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def plus(self, amount: float) -> "Estimate":
        return Estimate(self.value + amount, self.low + amount, self.high + amount)

    def over(self, amount: float) -> "Estimate":
        """So much, divided by it."""
        return Estimate(amount / self.value, amount / self.high, amount / self.low)

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


def count_footprint(run: Run) -> Footprint:
    """The footprint of a run with all of its techniques, as `thrifty explain` ends with it, in one trace."""
    claiming = [t for t in run.techniques if type(t).footprint is not Technique.footprint]
    _, footprint = count(run, tuple(t for t in run.techniques if t not in claiming), data_shard_count(run.techniques))
    for technique in claiming:
        footprint = technique.footprint(footprint)
    return footprint


def largest_part(footprint: Footprint) -> tuple[str, float]:
    """What most of the predicted peak is, and its share of it. Gradients appear while activations go, so only the
    larger of the two counts."""
    smaller = "gradients" if footprint.activations >= footprint.gradients else "activations"
    parts = {name: getattr(footprint, name) for name in HELD if name != smaller}
    name = max(parts, key=lambda part: parts[part])
    return name, parts[name] / max(footprint.memory, 1.0)


def interpolate_footprint(one: Footprint, other: Footprint, share: float) -> Footprint:
    """On the straight line from one (share 0) to the other (share 1)."""
    ends = ((field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(Footprint))
    return Footprint(**{name: first + share * (last - first) for name, first, last in ends})


@dataclass(frozen=True)
class StepTiming:
    """What whole steps of a run took in a process of their own: forward and backward of micro-batches of several
    sizes, then the update. Seconds, bytes, tokens."""

    rows: tuple[int, ...]
    """Examples of a micro-batch, from the smallest; the largest alone where that was far behind the best."""
    passes: tuple[float, ...]
    """Of forward and backward pass, for each of these: the median, which is what a run will see, ..."""
    least: tuple[float, ...]
    """... and the least, which is what candidates are compared by: other programs only ever add to it."""
    update: float
    spread: float
    """How far single steps were from that, as a share of it: half the distance of the quartiles."""
    startup: float
    """From building the model to the end of the first step and of the first batch that is judged, compilation
    included."""
    evaluation: float
    save: float
    memory: float
    """At the peak, above what the process took before the model was built; in micro-batches of the last size."""
    others: float = 0.0
    """How many of the cores worked for other programs meanwhile, ..."""
    cores: int = 1
    """... and how many there are."""
    process: float = 0.0
    """Bytes that the process held before the model was built, on a processor."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other work took so much that steps are faster on a quiet machine."""
        return self.others > DISTURBED * self.cores

    def step(self, batch: int, parts: int) -> float:
        """Seconds of a step of `batch` examples in so many micro-batches, as a run will see it."""
        return self._step(batch, parts, self.passes)

    def least_step(self, batch: int, parts: int) -> float:
        """The same on a machine where nothing else runs, as far as could be seen."""
        return self._step(batch, parts, self.least)

    def _step(self, batch: int, parts: int, passes: tuple[float, ...]) -> float:
        rows = -(-batch // parts)
        whole, rest = divmod(batch, rows)
        once = line_through(self.rows, passes)
        return whole * once(rows) + (once(rest) if rest else 0.0) + self.update

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> Self:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in kept.items()})


def line_through(rows: Sequence[int], seconds: Sequence[float]) -> Callable[[int], float]:
    """Seconds by rows: as measured where they were, else on the line through all; in proportion to the largest where
    noise outweighs what differs, so that the line would fall or start below zero."""
    slope, fixed = np.polyfit(rows, seconds, 1) if len(rows) > 1 else (0.0, 0.0)

    def at(wanted: int) -> float:
        if wanted in rows:
            return seconds[rows.index(wanted)]
        if slope <= 0 or fixed < 0:
            return seconds[-1] * wanted / rows[-1]
        return float(fixed + slope * wanted)

    return at
