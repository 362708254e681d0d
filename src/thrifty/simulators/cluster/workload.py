"""The work of a training step: FLOPs, bytes and collectives, traced from a model or computed from the sizes of a model.

All values are for one example (one row of tokens) and one part of the model, before division among ranks. Tensor
parallelism (Megatron-LM; Shoeybi et al. 2019, arXiv 1909.08053, section 3) divides the work between a column-parallel
and a row-parallel product. Norms and residual sums are whole on each rank. Sequence parallelism (Korthikanti et al.
2022, arXiv 2205.05198, section 4.2.2) divides norms and residual sums too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Literal, Self

Recompute = Literal["none", "selective", "every"]
"""Recomputation in the backward pass. "none": nothing. "selective": attention from the scores to the softmax weights
(Korthikanti et al. 2022, section 5). "every": each block from its input."""


@dataclass(frozen=True)
class DividedAmount:
    """An amount with a part that tensor parallelism splits among ranks, and a part that is whole on each rank."""

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
    """The work of one pass (forward or backward) of one example through a part of a model."""

    flops: DividedAmount = field(default_factory=DividedAmount)
    """FLOPs of matrix products and attention, including masked pairs of causal attention. A multiply-add counts as two.
    """
    moved: DividedAmount = field(default_factory=DividedAmount)
    """Bytes of activations read and written, if each chain of elementwise operations is one kernel."""
    unfused: DividedAmount = field(default_factory=DividedAmount)
    """Bytes of activations read and written, if each operation is one kernel."""
    kernels: int = 0
    reduced: float = 0.0
    """Bytes of activations that are all-reduced over a tensor group."""
    reduces: int = 0
    """Number of all-reduces over a tensor group."""
    attention: DividedAmount = field(default_factory=DividedAmount)
    """Part of `flops` in fused attention kernels. Unfused attention counts as matrix products."""

    def __add__(self, other: Self) -> "PassWork":
        return PassWork(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(frozen=True)
class WorkloadPart:
    """A block, or the part of a model before or after all blocks."""

    name: str
    parameters: DividedAmount
    """Number of parameters."""
    forward: PassWork
    backward: PassWork
    saved: DividedAmount
    """Bytes of activations saved for the backward pass, without recompute."""
    entry: float
    """Bytes of the part's input, which is sent between stages and is the only activation saved for a recomputed block.
    """
    for_weights: DividedAmount = field(default_factory=DividedAmount)
    """FLOPs of the backward pass for gradients of weights. No other stage waits for these gradients."""
    core: PassWork = field(default_factory=PassWork)
    """Work that selective recompute repeats."""
    core_saved: DividedAmount = field(default_factory=DividedAmount)
    """Saved bytes that selective recompute avoids."""
    is_block: bool = True
    """True for a block. Other parts are never recomputed."""

    def recomputed(self, recompute: Recompute) -> PassWork:
        """Return the work that is recomputed in the backward pass."""
        if not self.is_block:
            return PassWork()
        return {"none": PassWork(), "selective": self.core, "every": self.forward}[recompute]

    def saved_with(self, recompute: Recompute) -> DividedAmount:
        """Return the bytes of activations saved for the backward pass of one example."""
        if recompute == "none" or not self.is_block:
            return self.saved
        return DividedAmount(whole=self.entry) if recompute == "every" else self.saved - self.core_saved


@dataclass(frozen=True)
class Workload:
    """The work to train a model on examples of `length` tokens."""

    name: str
    blocks: tuple[WorkloadPart, ...]
    """Work of each block, in order."""
    embedding: WorkloadPart
    head: WorkloadPart
    """Work after the last block, including the loss."""
    length: int
    """Number of tokens per example."""
    itemsize: int = 2
    """Bytes per element of activations and weights in matrix products."""
    shared: float = 0.0
    """Number of parameters shared by embedding and head. These count in `embedding`."""

    @property
    def parts(self) -> Iterable[WorkloadPart]:
        return (self.embedding, *self.blocks, self.head)

    @cached_property
    def parameters(self) -> float:
        return sum(part.parameters.total for part in self.parts)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs per example, forward and backward, without recompute."""
        return sum((part.forward.flops + part.backward.flops).total for part in self.parts)

    def hardware_flops(self, recompute: Recompute) -> float:
        """Return the FLOPs per example, forward and backward, including recompute."""
        return self.model_flops + sum(block.recomputed(recompute).flops.total for block in self.blocks)
