"""Data classes for a chain of blocks: the cost of each block, and a schedule that selects kept and recomputed
activations.

Stage i is block i of the chain. It computes activation i+1 from activation i. Its backward pass requires activation i
and its own saved tensors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class RecomputeAction(Enum):
    PASS = "forward, keep nothing"  # noqa: S105 (no password)
    KEEP_INPUT = "forward, keep the input"
    KEEP_ALL = "forward, keep all saved tensors"
    BACKWARD = "backward"


class ScheduledOperation(NamedTuple):
    do: RecomputeAction
    stage: int


@dataclass(frozen=True)
class RecomputeSchedule:
    """Actions of forward passes by stage. A stage without an action keeps its input."""

    first: Mapping[int, RecomputeAction] = field(default_factory=dict)
    again: Mapping[int, Mapping[int, RecomputeAction]] = field(default_factory=dict)
    """For each stage: the actions of earlier stages that are recomputed for this stage's backward pass."""

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
    """Cost of a stage. Times may be in any unit. Temporary bytes do not include inputs, outputs and saved tensors."""

    forward: float
    backward: float
    output: int
    saved: int
    """Bytes that a forward pass adds if it keeps everything, including the output."""
    passing: int = 0
    """Temporary bytes of a forward pass that keeps nothing."""
    keeping: int = 0
    """Temporary bytes of a forward pass that keeps everything."""
    returning: int = 0
    """Temporary bytes of the backward pass, excluding the gradients of output and input."""
    stopped: float | None = None
    """Time of a forward pass that stops at its last saved tensor. None means `forward`."""


@dataclass(frozen=True)
class ChainCost:
    """Cost of a chain. `input` is the size of the chain's input in bytes; the chain's input is always kept. The
    gradient of the output has the output's size.
    """

    input: int
    stages: tuple[ChainStageCost, ...]

    def __len__(self) -> int:
        return len(self.stages)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each activation. The chain's input comes first."""
        return [self.input, *(stage.output for stage in self.stages)]

    def rerun(self, index: int) -> float:
        """Return the time of a stage's forward pass directly before its backward pass.

        The last stage is never recomputed, because its output is still used.
        """
        stage = self.stages[index]
        return stage.forward if stage.stopped is None or index == len(self) - 1 else stage.stopped

    @property
    def kept(self) -> int:
        """Bytes if all tensors are kept."""
        return self.input + sum(stage.saved for stage in self.stages)
