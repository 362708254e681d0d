"""What a step is predicted to hold and to move, as a value."""

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Footprint:
    """Bytes held at the peak of one step on one rank, and the work of the step.

    parameters, gradients and optimizer are exact sums over tensors. activations are what is alive when the forward
    pass of one micro-batch ends; temporary is what the peak of the step holds beyond activations or gradients,
    whichever is larger: gradients appear while activations go.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    flops: float = 0.0
    """Floating-point operations of one step over all ranks, a multiply-add counted as two."""
    traffic: float = 0.0
    """Bytes one rank sends to others in one step."""

    @property
    def memory(self) -> float:
        """Predicted peak bytes."""
        return self.parameters + self.optimizer + max(self.gradients, self.activations) + self.temporary

    def scale(self, **factors: float) -> "Footprint":
        """A copy with the named quantities multiplied: `footprint.scale(activations=0.25, flops=1.33)`."""
        return replace(self, **{name: getattr(self, name) * factor for name, factor in factors.items()})

    def add(self, **amounts: float) -> "Footprint":
        return replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "memory": self.memory}
