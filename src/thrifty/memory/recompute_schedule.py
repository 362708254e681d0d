"""A chain of blocks as values: what each block costs, and when a schedule keeps or recomputes.

Stage i turns activation i into activation i+1. Its backward pass needs activation i and what its forward pass saved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class RecomputeAction(Enum):
    PASS = "forward, keep nothing"  # noqa: S105 (no password)
    KEEP_INPUT = "forward, keep the input"
    KEEP_ALL = "forward, keep what the backward pass needs"
    BACKWARD = "backward"


class ScheduledOperation(NamedTuple):
    do: RecomputeAction
    stage: int


@dataclass(frozen=True)
class RecomputeSchedule:
    """What forward passes keep, by stage; where nothing is said, the input."""

    first: Mapping[int, RecomputeAction] = field(default_factory=dict)
    again: Mapping[int, Mapping[int, RecomputeAction]] = field(default_factory=dict)
    """For each stage, what others keep while forward passes are made again to reach its backward pass."""

    @classmethod
    def of(cls, operations: Sequence[ScheduledOperation]) -> "RecomputeSchedule":
        runs: list[dict[int, RecomputeAction]] = [{}]
        ends: list[int] = []
        for do, stage in operations:
            if do is RecomputeAction.BACKWARD:
                runs.append({})
                ends.append(stage)
            else:
                runs[-1][stage] = do
        return cls(runs[0], {stage: run for stage, run in zip(ends[1:], runs[1:-1], strict=True) if run})


@dataclass(frozen=True)
class ChainStageCost:
    """Times are in any unit. Temporaries are bytes that a pass holds at its peak beside what goes in, comes out and is
    saved."""

    forward: float
    backward: float
    output: int
    saved: int
    """What is there after a forward pass that keeps all and was not there before it: the output included."""
    passing: int = 0
    """Temporary bytes of a forward pass that keeps nothing."""
    keeping: int = 0
    """Of one that keeps all."""
    returning: int = 0
    """Of the backward pass, beside the gradients of output and input."""
    stopped: float | None = None
    """Time of a forward pass that ends with the last tensor it saves; all of `forward` where nothing is known."""


@dataclass(frozen=True)
class ChainCost:
    """The chain's input, in bytes, is held throughout; the gradient of its output has the output's size."""

    input: int
    stages: tuple[ChainStageCost, ...]

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each activation, the chain's input first."""
        return [self.input, *(stage.output for stage in self.stages)]

    def rerun(self, index: int) -> float:
        """Time of the forward pass of a stage whose backward pass comes next. The last one's output is yet to be used:
        it never runs again."""
        stage = self.stages[index]
        return stage.forward if stage.stopped is None or index == len(self) - 1 else stage.stopped

    @property
    def kept(self) -> int:
        """Bytes that are held when everything is kept."""
        return self.input + sum(stage.saved for stage in self.stages)
