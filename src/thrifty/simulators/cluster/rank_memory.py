"""Memory of each rank: parameters, gradients, optimizer state, and peak activations of a pipeline schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.cluster_mesh import StepSettings
from thrifty.simulators.cluster.workload import WorkloadPart

WEIGHT, MOMENTS = 2, 12
"""Bytes per parameter: the 16-bit weight, and Adam's state (float32 copy and two moments)."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of parameters, gradients and optimizer state per rank."""

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
    """Return the bytes per rank by ZeRO's formulas (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).

    Adam in mixed precision has 16 bytes per parameter, of which 12 are optimizer state (master weight and two moments
    in float32). Stage 1 shards the optimizer state over N `ranks`. Stage 2 also shards gradients, stage 3 also weights.
    With stage 2, a parameter takes 2 + 14/N bytes, as in the paper. DeepSpeed's estimator has 2 + 18/N, because
    DeepSpeed also stores float32 gradients (`gradient` = 6). Raises UsageError for any other stage.
    """
    if zero not in range(4):
        raise UsageError(f"ZeRO has no stage {zero}", fix="use zero 0 (no sharding), 1, 2 or 3")
    over = [ranks if zero >= stage else 1 for stage in (3, 2, 1)]
    sizes = [parameters * size / n for size, n in zip((weight, gradient, optimizer), over, strict=True)]
    return StateBytes(*sizes)


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of one rank in a step, in bytes."""

    rank: int
    """Index of the pipeline rank. All data and tensor ranks of a pipeline rank have the same peak."""
    state: StateBytes
    activations: float
    """Peak of saved activations."""
    temporary: float
    """Activations of the block that is being recomputed, and the gathered weights of that block."""
    limit: float
    """Device memory."""

    @property
    def total(self) -> float:
        return self.state.total + self.activations + self.temporary

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def activation_bytes(parts: Sequence[WorkloadPart], tensor: int, settings: StepSettings) -> float:
    """Return the bytes of saved activations of one micro-batch on a stage, per rank of a tensor group."""
    sizes = [part.saved_with(settings.recompute).per_rank(tensor, settings.sequence_parallel) for part in parts]
    return sum(sizes) * settings.micro_batch


def recomputed_bytes(parts: Sequence[WorkloadPart], tensor: int, settings: StepSettings) -> float:
    """Return the additional bytes of a stage during recomputation of one block: the maximum over blocks."""
    recomputed = [part.saved - part.saved_with(settings.recompute) for part in parts]
    return max(each.per_rank(tensor, settings.sequence_parallel) for each in recomputed) * settings.micro_batch
