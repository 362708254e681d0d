"""Memory of each rank: parameters, gradients and optimizer state, and activations over a pipeline schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.cluster_mesh import StepSettings
from thrifty.simulators.cluster.workload import WorkloadPart

WEIGHT, MOMENTS = 2, 12
"""Bytes of a parameter in products, and of its float32 copy and two moments in the optimizer state of Adam."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state on a rank."""

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
    """Return the bytes by ZeRO's formulas (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).

    Adam in mixed precision has 16 bytes per parameter, 12 of them optimizer state (master weight and two moments in
    float32). Stage 1 divides these among `ranks`, stage 2 the gradients too, stage 3 the weights too. Stage 2 is the
    paper's 2 + 14/N. DeepSpeed's estimator has 2 + 18/N, because it keeps a float32 copy of gradients (`gradient` = 6).
    Raises UsageError for another stage.
    """
    if zero not in range(4):
        raise UsageError(f"ZeRO has no stage {zero}", fix="use zero 0 (divide nothing), 1, 2 or 3")
    over = [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    sizes = [parameters * size / n for size, n in zip((weight, gradient, optimizer), over, strict=True)]
    return StateBytes(*sizes)


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank in a step, in bytes."""

    rank: int
    """Pipeline rank; all ranks of the same pipeline rank hold as much."""
    state: StateBytes
    activations: float
    """Activations at their peak."""
    temporary: float
    """Activations of the block that is recomputed, and its gathered weights."""
    limit: float
    """Memory of the device."""

    @property
    def total(self) -> float:
        return self.state.total + self.activations + self.temporary

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def activation_bytes(parts: Sequence[WorkloadPart], tensor: int, settings: StepSettings) -> float:
    """Return the activations of one micro-batch that a stage keeps between its passes, per rank of a tensor group."""
    sizes = [part.saved_with(settings.recompute).per_rank(tensor, settings.sequence_parallel) for part in parts]
    return sum(sizes) * settings.micro_batch


def recomputed_bytes(parts: Sequence[WorkloadPart], tensor: int, settings: StepSettings) -> float:
    """Return the additional bytes that a stage holds while it recomputes one block's activations."""
    recomputed = [part.saved - part.saved_with(settings.recompute) for part in parts]
    return max(each.per_rank(tensor, settings.sequence_parallel) for each in recomputed) * settings.micro_batch
