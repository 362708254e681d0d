"""A candidate of a plan: ways to go, and what is known of where they lead."""

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
    """Ways to go, one of an axis at most, and what is known of where they lead."""

    ways: tuple[PlanOption, ...]
    techniques: tuple[Technique, ...]
    batch: int
    relative: float = 1.0
    """Expected seconds of a step over those of the recipe as it is."""
    footprint: Footprint | None = field(default=None, compare=False)
    timing: StepTiming | None = field(default=None, compare=False)
    undivided: Footprint | None = field(default=None, compare=False)
    """Of the same on one rank, whose state is what checkpoints hold."""

    @cached_property
    def parts(self) -> int:
        return max((t.micro_batches for t in self.techniques if Claim.MICRO_BATCHES in t.claims), default=1)

    @cached_property
    def mesh(self) -> Mesh:
        return mesh_of(self.ways)

    @property
    def ranks(self) -> int:
        return self.mesh.least_ranks

    @property
    def tensors(self) -> float:
        """Bytes of tensors at the peak of a rank, counted."""
        assert self.footprint is not None
        return self.footprint.memory

    @property
    def counted_high(self) -> float:
        """By what factor a rank may hold more than is counted for it."""
        return COUNTED_HIGH if self.ranks == 1 else OVER_MESH_HIGH

    @property
    def is_compiled(self) -> bool:
        return any(Claim.COMPILED_BLOCKS in technique.claims for technique in self.techniques)

    @property
    def process_kind(self) -> tuple[bool, bool, int]:
        """Kind of its process, on which the bytes beyond its tensors depend: a compiler's own memory, freed memory that
        stays or goes back (`training.memory_meter.set_freed_memory_policy`), and the number of ranks."""
        gives_back = any(technique.limits_activation_bytes for technique in self.techniques)
        return self.is_compiled, gives_back, self.ranks

    @property
    def step(self) -> float:
        """Measured seconds of a step, as a run will see it."""
        assert self.timing is not None
        return self.timing.step(self.batch, self.parts)

    @property
    def least_step(self) -> float:
        """The same without what other programs add: what candidates are compared by."""
        assert self.timing is not None
        return self.timing.least_step(self.batch, self.parts)

    @property
    def label(self) -> str:
        return ", ".join(way.label for way in self.ways) or "the recipe as it is"
