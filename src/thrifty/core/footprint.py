"""Predicted memory and work of one training step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Footprint:
    """Predicted bytes at the peak of one step on one rank, and the work of the step.

    `parameters`, `gradients` and `optimizer` are exact sums over tensors. `buffers` are other tensors of model and
    optimizer, such as position tables and the state of techniques. `activations` are the saved tensors at the end of
    the forward pass of one micro-batch. The backward pass frees activations while it creates gradients. `temporary` is
    the peak of the step and its update, above the larger of gradients and activations.
    """

    parameters: float = 0.0
    outside: float = 0.0
    """Bytes of the parameters outside blocks."""
    block: float = 0.0
    """Bytes of the parameters in the largest block."""
    vectors: float = 0.0
    """Bytes of the parameters that are not matrices: gains, biases, positions."""
    hidden: float = 0.0
    """Bytes of the hidden states between two blocks, for one micro-batch."""
    buffers: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    saved: float = 0.0
    """Bytes of the activations that blocks save. All other activations belong to the embedding and the output head."""
    passes: float = 0.0
    """Peak bytes of activations and temporary tensors in forward and backward pass, without state and complete
    gradients. `passes`, `saved` and `inside` explain a peak and are not part of `memory`."""
    inside: float = 0.0
    """Like `passes`, but only after the first gradient of a block is complete."""
    temporary: float = 0.0
    flops: float = 0.0
    """Floating-point operations of one step over all ranks; a multiply-add counts as two."""
    update_flops: float = 0.0
    """Part of `flops` that the update takes, such as the matrix products of Muon."""
    traffic: float = 0.0
    """Bytes that one rank sends to others in one step."""

    @property
    def memory(self) -> float:
        """Predicted peak bytes."""
        return self.parameters + self.buffers + self.optimizer + self.peak

    @property
    def peak(self) -> float:
        """Predicted bytes that are allocated and freed within one step."""
        return max(self.gradients, self.activations) + self.temporary

    def peaking(self, peak: float) -> "Footprint":
        """Return a copy with this value of `peak`. Only `temporary` changes."""
        return replace(self, temporary=max(peak - max(self.gradients, self.activations), 0.0))

    def scale(self, **factors: float) -> "Footprint":
        """Return a copy with the named values multiplied: `footprint.scale(activations=0.25, flops=1.33)`."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def add(self, **amounts: float) -> "Footprint":
        """Return a copy with these amounts added to the named values."""
        return replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "memory": self.memory}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Footprint":
        """Return the footprint of a dictionary of `as_dict`. Absent values, and values that are no numbers, are 0."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: values[name] for name in names if isinstance(values.get(name), int | float)})
