"""Candidates of a plan: combinations of options."""

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from thrifty.core.claims import Claim
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import Mesh
from thrifty.core.technique import Technique
from thrifty.planning.cost_estimates import COUNTED_HIGH, OVER_MESH_HIGH, StepTiming
from thrifty.planning.search_space import PlanOption, mesh_of


@dataclass(frozen=True)
class PlanCandidate:
    """A combination of options, at most one per axis. Footprint and timing are None until known."""

    options: tuple[PlanOption, ...]
    techniques: tuple[Technique, ...]
    batch: int
    relative: float = 1.0
    """Expected step time, relative to the unchanged recipe."""
    footprint: Footprint | None = field(default=None, compare=False)
    timing: StepTiming | None = field(default=None, compare=False)
    undivided: Footprint | None = field(default=None, compare=False)
    """Footprint of the candidate on one rank. It determines the size of checkpoints."""

    @cached_property
    def parts(self) -> int:
        return max((t.micro_batches for t in self.techniques if Claim.MICRO_BATCHES in t.claims), default=1)

    @cached_property
    def relative_steps(self) -> float:
        """Steps to equal loss, relative to the unchanged recipe."""
        return prod(option.relative_steps for option in self.options)

    @property
    def expected(self) -> float:
        """Expected time to equal loss, relative to the unchanged recipe."""
        return self.relative * self.relative_steps

    @cached_property
    def mesh(self) -> Mesh:
        return mesh_of(self.options)

    @property
    def ranks(self) -> int:
        return self.mesh.least_ranks

    @property
    def tensors(self) -> float:
        """Counted bytes of tensors per rank, at peak memory."""
        assert self.footprint is not None
        return self.footprint.memory

    @property
    def counted_high(self) -> float:
        """Factor from counted bytes to maximum expected bytes per rank."""
        return COUNTED_HIGH if self.ranks == 1 else OVER_MESH_HIGH

    @property
    def is_compiled(self) -> bool:
        return any(Claim.COMPILED_BLOCKS in technique.claims for technique in self.techniques)

    @property
    def process_kind(self) -> tuple[bool, bool, int]:
        """Key of the kind of process. Processes of one kind use about equal memory in addition to tensors.

        The elements are: compiled or not, freed memory returned to the system or not
        (`training.memory_meter.set_freed_memory_policy`), and the number of ranks.
        """
        returns_memory = any(technique.limits_activation_bytes for technique in self.techniques)
        return self.is_compiled, returns_memory, self.ranks

    @property
    def step(self) -> float:
        """Measured median seconds of a step. A run is expected to take this time."""
        assert self.timing is not None
        return self.timing.step(self.batch, self.parts)

    @property
    def least_step(self) -> float:
        """Measured minimum seconds of a step. Candidates are compared by the minimum, because other processes only add
        time."""
        assert self.timing is not None
        return self.timing.least_step(self.batch, self.parts)

    @property
    def label(self) -> str:
        return ", ".join(option.label for option in self.options) or "the unchanged recipe"
