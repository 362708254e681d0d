"""What a step is predicted to hold and to move, as a value."""

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Footprint:
    """Bytes held at the peak of one step on one rank, and the work of the step.

    parameters, gradients and optimizer are exact sums over tensors; buffers are what model and optimizer hold besides:
    tables of positions, and what techniques keep. activations are what is alive when the forward pass of one
    micro-batch ends; temporary is what the peak of the step, its update included, holds beyond activations or
    gradients, whichever is larger: gradients appear while activations go.
    """

    parameters: float = 0.0
    outside: float = 0.0
    """Bytes of those parameters that are in no block."""
    block: float = 0.0
    """Bytes of those in the largest block."""
    vectors: float = 0.0
    """Bytes of those that are no matrices: gains, biases, positions."""
    hidden: float = 0.0
    """Bytes of the hidden states of one micro-batch that one block hands to the next."""
    buffers: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    saved: float = 0.0
    """Bytes of the activations that blocks keep; the rest is that of both ends."""
    passes: float = 0.0
    """Bytes at the peak of forward and backward pass beside state and complete gradients: activations and what is
    temporary. Like `saved` and `inside` it tells how a peak comes about, and is no part of the sum."""
    inside: float = 0.0
    """The same from when the first gradient of a block is complete."""
    temporary: float = 0.0
    flops: float = 0.0
    """Floating-point operations of one step over all ranks, a multiply-add counted as two."""
    traffic: float = 0.0
    """Bytes one rank sends to others in one step."""

    @property
    def memory(self) -> float:
        """Predicted peak bytes."""
        return self.parameters + self.buffers + self.optimizer + self.peak

    @property
    def peak(self) -> float:
        """What of it comes and goes in a step."""
        return max(self.gradients, self.activations) + self.temporary

    def peaking(self, peak: float) -> "Footprint":
        """A copy whose peak is this, by what is temporary."""
        return replace(self, temporary=max(peak - max(self.gradients, self.activations), 0.0))

    def scale(self, **factors: float) -> "Footprint":
        """A copy with the named quantities multiplied: `footprint.scale(activations=0.25, flops=1.33)`."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def add(self, **amounts: float) -> "Footprint":
        return replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "memory": self.memory}
