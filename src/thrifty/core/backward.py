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
    """True if gradients are not finite and the loss scale was lowered. The skipped step is not a sign of divergence."""
    parts: Tensor | None = None
    """Total weight of all parts of the examples, such as answer tokens (scalar). Loss and gradients must still be
    divided by this total. None if only examples have weights."""
    mean_of: int | None = None
    """Number of rows if the loss is a mean over rows and cannot be divided into a loss per example; None otherwise."""
    scale_growth: float = 1.0
    """Factor by which the loss scale, and all gradients inside the pass, grow from this step to the next."""

    def __add__(self, other: "BackwardResult") -> "BackwardResult":
        known = [each.parts for each in (self, other) if each.parts is not None]
        parts = sum(known[1:], known[0]) if known else None
        sizes = {each.mean_of for each in (self, other)} - {None}
        if len(sizes) > 1:
            raise RefusedError(
                f"micro-batches have {' and '.join(map(str, sorted(sizes)))} examples, so their mean losses do not "
                "average to the mean loss of the batch",
                fix="return one loss per example; or return (losses, weights); or use micro-batches of equal size",
            )
        overflow_handled = self.overflow_handled or other.overflow_handled
        return BackwardResult(
            self.loss + other.loss, self.notes | other.notes, overflow_handled, parts, next(iter(sizes), None)
        )


Backward = Callable[[nn.Module, Objective, Batch], BackwardResult]


def plain_backward(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
    """Run the whole batch in one forward and one backward pass."""
    prediction = objective.predict(model, batch)
    losses, weights = objective.losses(prediction, batch), prediction.part_weights
    mean_of = len(batch) if prediction.is_mean else None
    if mean_of and not weigh_alike(batch):
        raise RefusedError(
            "examples are sampled with weights, but the loss is a mean with equal weights",
            fix="return one loss per example",
        )
    loss = (losses * batch.weight).sum()
    del prediction, losses  # free tensors that the backward pass does not read
    loss.backward()
    return BackwardResult(loss.detach(), parts=None if weights is None else weights.detach().sum(), mean_of=mean_of)


def weigh_alike(batch: Batch) -> bool:
    """Return True if all examples have the same weight. Fake tensors have no values and count as equal."""
    first = batch.weight[0]
    return isinstance(first, FakeTensor) or bool((batch.weight == first).all())


def divided_by_parts(backward: Backward) -> Backward:
    """Return a backward pass that divides loss and gradients by the total weight of all parts, summed over the data
    ranks. Objectives without weighted parts are unaffected. The pass requires whole effective batches. It raises
    RefusedError if examples have different weights, and UsageError if the total weight is 0."""

    def divided(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome = backward(model, objective, batch)
        if outcome.parts is None:
            return outcome
        if not weigh_alike(batch):
            raise RefusedError(
                "examples are sampled with weights, but the loss is divided by the weights of their parts",
                fix="return one loss per example",
            )
        parts, data = outcome.parts.clone(), axis("data")
        if data.size > 1:
            dist.all_reduce(parts, group=data.group)
        if not isinstance(parts, FakeTensor) and not bool(parts):
            raise UsageError(
                "the weights of all parts of the batch sum to 0, so there is nothing to learn",
                fix="remove examples without a part to learn",
            )
        total = parts * batch.weight[0]
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total)
        return replace(outcome, loss=outcome.loss / total, parts=None)

    return divided
