"""How gradients are obtained: a function that leaves them, summed, in each parameter's `.grad`."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective


@dataclass
class BackwardResult:
    """What one backward pass found: the weighted loss (scalar, detached) and anything worth recording."""

    loss: Tensor
    notes: dict[str, float] = field(default_factory=dict)
    answered: bool = False
    """Whether gradients that are not finite have been answered already, by a lower loss scale: such a step is skipped
    like any other, but is no sign of divergence."""
    parts: Tensor | None = None
    """Sum of the weights of the examples' parts (scalar), by which the loss and the gradients are still to be divided;
    None where examples count by their weights alone."""
    scale_growth: float = 1.0
    """Factor by which the loss scale, and so all gradients inside the pass, grows from this step to the next."""

    def __add__(self, other: "BackwardResult") -> "BackwardResult":
        parts = None if self.parts is None or other.parts is None else self.parts + other.parts
        return BackwardResult(self.loss + other.loss, self.notes | other.notes, self.answered or other.answered, parts)


Backward = Callable[[nn.Module, Objective, Batch], BackwardResult]


def plain_backward(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
    """The whole batch in one forward and one backward pass."""
    prediction = objective.predict(model, batch)
    loss = (objective.losses(prediction, batch) * batch.weight).sum()
    loss.backward()
    weights = prediction.part_weights
    return BackwardResult(loss.detach(), parts=None if weights is None else weights.detach().sum())
