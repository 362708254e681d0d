"""Backward passes: functions that add the gradients of a batch to each parameter's `.grad`."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.mesh import axis
from thrifty.core.objective import Objective


@dataclass
class BackwardResult:
    """Result of one backward pass: the weighted loss (scalar, detached) and values to record."""

    loss: Tensor
    notes: dict[str, float] = field(default_factory=dict)
    overflow_handled: bool = False
    """True if a lower loss scale already handles gradients that are not finite. Such a step is skipped like any other,
    but is no sign of divergence."""
    parts: Tensor | None = None
    """Sum of the weights of the examples' parts (scalar); loss and gradients are still to be divided by it. None if
    each example counts by its own weight alone."""
    mean_of: int | None = None
    """Number of rows if the loss is their mean and cannot be divided into a loss per example; None otherwise."""
    scale_growth: float = 1.0
    """Growth factor of the loss scale, and so of all gradients inside the pass, from this step to the next."""

    def __add__(self, other: "BackwardResult") -> "BackwardResult":
        known = [each.parts for each in (self, other) if each.parts is not None]
        parts = sum(known[1:], known[0]) if known else None
        sizes = {each.mean_of for each in (self, other)} - {None}
        if len(sizes) > 1:
            raise RefusedError(
                f"the loss is a mean, and means over micro-batches of {' and '.join(map(str, sorted(sizes)))} examples "
                "do not add up to that of all",
                fix="return one loss for each example, losses and weights, or choose micro-batches of equal size",
            )
        overflow_handled = self.overflow_handled or other.overflow_handled
        return BackwardResult(
            self.loss + other.loss, self.notes | other.notes, overflow_handled, parts, next(iter(sizes), None)
        )


Backward = Callable[[nn.Module, Objective, Batch], BackwardResult]


def plain_backward(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
    """Run the whole batch in one forward and one backward pass."""
    prediction = objective.predict(model, batch)
    mean_of = len(batch) if prediction.is_mean else None
    if mean_of and not weigh_alike(batch):
        raise RefusedError(
            "examples are sampled with weights, but the loss is a mean in which all count alike",
            fix="return one loss for each example",
        )
    loss, weights = (objective.losses(prediction, batch) * batch.weight).sum(), prediction.part_weights
    del prediction  # free tensors that the backward pass does not read
    loss.backward()
    return BackwardResult(loss.detach(), parts=None if weights is None else weights.detach().sum(), mean_of=mean_of)


def weigh_alike(batch: Batch) -> bool:
    """Return True if all examples have the same weight. Fake tensors have no values and count as equal."""
    first = batch.weight[0]
    return isinstance(first, FakeTensor) or bool((batch.weight == first).all())


def divided_by_parts(backward: Backward) -> Backward:
    """Return a backward pass for a whole effective batch that divides loss and gradients by the parts' weights. The
    weights are summed over all data ranks. Nothing changes for objectives that do not weigh parts. The pass raises
    RefusedError if examples have different weights."""

    def divided(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome = backward(model, objective, batch)
        if outcome.parts is None:
            return outcome
        if not weigh_alike(batch):
            raise RefusedError(
                "examples are sampled with weights, but the loss counts by the weights of their parts",
                fix="return one loss for each example",
            )
        parts, data = outcome.parts.clone(), axis("data")
        if data.size > 1:
            dist.all_reduce(parts, group=data.group)
        if not isinstance(parts, FakeTensor) and not bool(parts):
            raise UsageError(
                "the weights of all parts of the batch sum to 0, so that the batch has nothing to learn",
                fix="remove the examples without a part to learn",
            )
        total = parts * batch.weight[0]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total)
        return replace(outcome, loss=outcome.loss / total, parts=None)

    return divided
