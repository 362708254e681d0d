"""The work of a training step, as values: traced from a model, or in closed form from its sizes.

Everything is for one example (one row of tokens) and one part of the model, before any of it is divided among ranks.
Tensor parallelism after Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053, section 3) divides what happens between a
column-split and a row-split product and leaves the rest, norms and sums of residuals, to each rank as a whole; sequence
parallelism (Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2) divides that too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, Self

Recompute = Literal["none", "selective", "every"]
"""What runs again in the backward pass: nothing, the core of attention (from the scores to what multiplies the values;
Korthikanti et al. 2022, section 5), or every block from its input."""


@dataclass(frozen=True)
class DividedAmount:
    """An amount of which tensor parallelism divides one part among its ranks, and leaves another to each of them."""

    split: float = 0.0
    whole: float = 0.0

    @property
    def total(self) -> float:
        return self.split + self.whole

    def per_rank(self, tensor: int, sequence_parallel: bool = False) -> float:
        return self.split / tensor + self.whole / (tensor if sequence_parallel else 1)

    def __add__(self, other: Self) -> "DividedAmount":
        return DividedAmount(self.split + other.split, self.whole + other.whole)

    def __sub__(self, other: Self) -> "DividedAmount":
        return DividedAmount(self.split - other.split, self.whole - other.whole)

    def __mul__(self, factor: float) -> "DividedAmount":
        return DividedAmount(self.split * factor, self.whole * factor)


@dataclass(frozen=True)
class PassWork:
    """One pass of one example through a part of a model."""

    flops: DividedAmount = field(default_factory=DividedAmount)
    """Of matrix products and attention, a multiply-add counted as two, nothing taken off for a causal mask."""
    moved: DividedAmount = field(default_factory=DividedAmount)
    """Bytes of activations read and written where chains of elementwise operations run as one kernel each."""
    unfused: DividedAmount = field(default_factory=DividedAmount)
    """The same where every operation is a kernel of its own."""
    kernels: int = 0
    reduced: float = 0.0
    """Bytes of activations that the ranks of a tensor group sum up."""
    reduces: int = 0
    """In how many collectives they do."""
    attention: DividedAmount = field(default_factory=DividedAmount)
    """Part of `flops` in fused attention kernels. Unfused attention is products whose scores go through memory."""

    def __add__(self, other: Self) -> "PassWork":
        return PassWork(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class WorkloadPart:
    """A block, or what stands before or after all blocks."""

    name: str
    parameters: DividedAmount
    """Numbers, not bytes."""
    forward: PassWork
    backward: PassWork
    saved: DividedAmount
    """Bytes kept from the forward for the backward pass where nothing is recomputed."""
    entry: float
    """Bytes of the hidden states that come in: sent between stages, and all that stays where a block is recomputed."""
    for_weights: DividedAmount = field(default_factory=DividedAmount)
    """FLOPs of the backward pass that make gradients of weights, which no other stage waits for."""
    core: PassWork = field(default_factory=PassWork)
    """What selective recompute runs again."""
    core_saved: DividedAmount = field(default_factory=DividedAmount)
    """What selective recompute does not keep."""
    is_block: bool = True
    """Or stands before or behind all blocks, and is never recomputed."""

    def again(self, recompute: Recompute) -> PassWork:
        """What is run a second time before the backward pass."""
        if not self.is_block:
            return PassWork()
        return {"none": PassWork(), "selective": self.core, "every": self.forward}[recompute]

    def kept(self, recompute: Recompute) -> DividedAmount:
        """Bytes from the forward to the backward pass of one example."""
        if recompute == "none" or not self.is_block:
            return self.saved
        return DividedAmount(whole=self.entry) if recompute == "every" else self.saved - self.core_saved


@dataclass(frozen=True)
class Workload:
    """A model to be trained on examples of `length` tokens."""

    name: str
    blocks: tuple[WorkloadPart, ...]
    """One for each block, in order."""
    embedding: WorkloadPart
    head: WorkloadPart
    """Everything behind the last block, with the loss."""
    length: int
    """Tokens in an example."""
    itemsize: int = 2
    """Bytes of a number in products and activations."""
    shared: float = 0.0
    """Parameters of the embedding that are the head's as well, and stand in the embedding's count."""

    @property
    def parts(self) -> Iterable[WorkloadPart]:
        return (self.embedding, *self.blocks, self.head)

    @cached_property
    def parameters(self) -> float:
        return sum(part.parameters.total for part in self.parts)

    @cached_property
    def model_flops(self) -> float:
        """Of one example forward and backward, nothing counted twice."""
        return sum((part.forward.flops + part.backward.flops).total for part in self.parts)

    def hardware_flops(self, recompute: Recompute) -> float:
        """The same with what is run again in the backward pass."""
        return self.model_flops + sum(block.again(recompute).flops.total for block in self.blocks)
