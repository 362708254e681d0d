"""Bytes that each rank holds: what stays through a step, and activations over the time of a pipeline schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.cluster_mesh import StepSettings
from thrifty.simulators.cluster.workload import WorkloadPart

WEIGHT, MOMENTS = 2, 12
"""Bytes of a parameter in products, and of its float32 copy and two moments in the optimizer (Adam)."""


@dataclass(frozen=True)
class StateBytes:
    """What a rank holds between steps and while gradients add up."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    parameters: float,
    zero: int = 0,
    ranks: int = 1,
    *,
    weight: float = WEIGHT,
    gradient: float = 2,
    optimizer: float = MOMENTS,
) -> StateBytes:
    """The formulas of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 5), with bytes for each parameter.

    Of 16 for Adam in mixed precision, 12 are the optimizer's (master weight and two moments in float32). Stage 1
    divides those among `ranks`, 2 the gradients too, 3 the weights too. For stage 2 that is the paper's 2 + 14/N;
    DeepSpeed's estimator says 2 + 18/N, since it keeps a copy of gradients in float32 (give `gradient` = 6 for that).
    """
    if zero not in range(4):
        raise UsageError(f"ZeRO has no stage {zero}", fix="choose 0 (nothing divided), 1, 2 or 3")
    over = [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    sizes = [parameters * size / n for size, n in zip((weight, gradient, optimizer), over, strict=True)]
    return StateBytes(*sizes)


@dataclass(frozen=True)
class RankMemory:
    """The most that one rank holds in a step."""

    rank: int
    """Of the pipeline; all others at the same place of it hold as much."""
    state: StateBytes
    activations: float
    """At their peak."""
    temporary: float
    """Of the one block that is being recomputed, and of weights gathered for it."""
    limit: float
    """Bytes of the device."""

    @property
    def total(self) -> float:
        return self.state.total + self.activations + self.temporary

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def activation_bytes(parts: Sequence[WorkloadPart], tensor: int, settings: StepSettings) -> float:
    """What a stage of these parts keeps of one micro-batch between its passes, on each rank of a tensor group."""
    kept = [part.kept(settings.recompute).per_rank(tensor, settings.sequence_parallel) for part in parts]
    return sum(kept) * settings.micro_batch


def recomputed_bytes(parts: Sequence[WorkloadPart], tensor: int, settings: StepSettings) -> float:
    """What a stage holds beside that while it makes one block's activations again."""
    again = [part.saved - part.kept(settings.recompute) for part in parts]
    return max(each.per_rank(tensor, settings.sequence_parallel) for each in again) * settings.micro_batch
