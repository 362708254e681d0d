"""A candidate of a plan: a combination of options, with its footprint and timing."""

from dataclasses import dataclass, field
from functools import cached_property

from thrifty.core.claims import Claim
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import Mesh
from thrifty.core.technique import Technique
from thrifty.planning.cost_estimates import COUNTED_HIGH, OVER_MESH_HIGH, StepTiming
from thrifty.planning.search_space import PlanOption, mesh_of


@dataclass(frozen=True)
class PlanCandidate:
    """A combination of options, at most one per axis, with its footprint and timing as far as known."""

    options: tuple[PlanOption, ...]
    techniques: tuple[Technique, ...]
    batch: int
    relative: float = 1.0
    """Expected seconds of a step over the unchanged recipe's."""
    footprint: Footprint | None = field(default=None, compare=False)
    timing: StepTiming | None = field(default=None, compare=False)
    undivided: Footprint | None = field(default=None, compare=False)
    """Footprint of the candidate on one rank, whose state is in checkpoints."""

    @cached_property
    def parts(self) -> int:
        return max((t.micro_batches for t in self.techniques if Claim.MICRO_BATCHES in t.claims), default=1)

    @cached_property
    def mesh(self) -> Mesh:
        return mesh_of(self.options)

    @property
    def ranks(self) -> int:
        return self.mesh.least_ranks

    @property
    def tensors(self) -> float:
        """Counted bytes of tensors at the peak of a rank."""
        assert self.footprint is not None
        return self.footprint.memory

    @property
    def counted_high(self) -> float:
        """Factor from counted to largest expected bytes of a rank."""
        return COUNTED_HIGH if self.ranks == 1 else OVER_MESH_HIGH

    @property
    def is_compiled(self) -> bool:
        return any(Claim.COMPILED_BLOCKS in technique.claims for technique in self.techniques)

    @property
    def process_kind(self) -> tuple[bool, bool, int]:
        """Kind of process, which determines the bytes beyond its tensors.

        It consists of the compiler's own memory, the policy for freed memory
        (`training.memory_meter.set_freed_memory_policy`), and the number of ranks.
        """
        returns_memory = any(technique.limits_activation_bytes for technique in self.techniques)
        return self.is_compiled, returns_memory, self.ranks

    @property
    def step(self) -> float:
        """Median measured seconds of a step, as a run will see them."""
        assert self.timing is not None
        return self.timing.step(self.batch, self.parts)

    @property
    def least_step(self) -> float:
        """Shortest measured seconds of a step, without the time added by other processes; candidates are compared by
        these."""
        assert self.timing is not None
        return self.timing.least_step(self.batch, self.parts)

    @property
    def label(self) -> str:
        return ", ".join(option.label for option in self.options) or "the unchanged recipe"
