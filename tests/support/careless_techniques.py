"""Techniques with the classic silent bugs of the field, as somebody might write them."""

from dataclasses import replace
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource, WrappedSource
from thrifty.core.gradient_transform import GradientTransform, Scalars, Slots, with_prefix, without_prefix
from thrifty.core.objective import Objective
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.module_surgery import find_blocks, wrap_forward


class MeanOfMeans(Technique):
    """Scales the loss of each micro-batch to its own mean and divides by their number."""

    stage, numerics, tolerance = Stage.ACCUMULATE, Numerics.ROUNDING, 1e-4

    def backward(self, backward: Backward) -> Backward:
        def in_halves(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            half = len(batch) // 2
            total = BackwardResult(torch.zeros(()))
            for part in (batch.rows(0, half), batch.rows(half, len(batch))):
                total = total + backward(model, objective, part.weighted(part.weight / part.weight.sum() / 2))
            return total

        return in_halves


class ReentrantRecompute(Technique):
    """Recomputes every other block by torch's older way, which sees no parameter that a frozen input hides."""

    stage, numerics = Stage.RECOMPUTE, Numerics.EXACT

    def model(self, model: nn.Module) -> nn.Module:
        for block in list(find_blocks(model)[1])[::2]:
            wrap_forward(block, lambda module, inner, *args, **kwargs: checkpoint(inner, *args, use_reentrant=True))
        return model


class Forgetful(Technique):
    """Counts batches as they are taken: another count after a resume."""

    stage, numerics = Stage.SOURCE, Numerics.DIFFERENT

    def batches(self, source: BatchSource) -> BatchSource:
        return Counting(source)


class Counting(WrappedSource):
    def __init__(self, source: BatchSource):
        self.source, self.batch, self.taken = source, source.batch, 0

    def rows(self, step: int, start: int, stop: int) -> Batch:
        self.taken += 1
        return self.source.rows(self.taken - 1, start, stop)


class Shrinking(Technique):
    """Answers a lack of memory with half of the batch; what is left of it is never seen."""

    stage, numerics, tolerance = Stage.ACCUMULATE, Numerics.ROUNDING, 1e-4

    def backward(self, backward: Backward) -> Backward:
        def tried(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            try:
                return backward(model, objective, batch)
            except torch.OutOfMemoryError:
                return tried(model, objective, batch.rows(0, len(batch) // 2))

        return tried


class Splitting(Technique):
    """The same done right: all rows, in smaller micro-batches."""

    stage, numerics, tolerance = Stage.ACCUMULATE, Numerics.ROUNDING, 1e-4

    def backward(self, backward: Backward) -> Backward:
        def tried(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            try:
                return backward(model, objective, batch)
            except torch.OutOfMemoryError:
                half = len(batch) // 2
                first = tried(model, objective, replace(batch.rows(0, half), last=False))
                return first + tried(model, objective, replace(batch.rows(half, len(batch)), last=batch.last))

        return tried


class TurnsBack(Technique):
    """Turns gradients around from the third step on."""

    stage, numerics, tolerance = Stage.REDUCE, Numerics.ROUNDING, 1e-4

    def backward(self, backward: Backward) -> Backward:
        steps = count(1)

        def turned(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            outcome = backward(model, objective, batch)
            if next(steps) > 2:
                for parameter in model.parameters():
                    parameter.grad = None if parameter.grad is None else -parameter.grad
            return outcome

        return turned


class HalfMasked(Technique):
    """Keeps every other row of each matrix at zero, and lets the optimizer gather momentum for it."""

    stage, numerics = Stage.SPARSITY, Numerics.DIFFERENT

    def update(self, transform: GradientTransform) -> GradientTransform:
        return MaskedUpdates(transform)


class MaskedUpdates(GradientTransform):
    name = "half"

    def __init__(self, rest: GradientTransform):
        self.rest = rest

    def scalars(self, step: int, age: int) -> dict[str, float]:
        return with_prefix("rest", self.rest.scalars(step, age))

    def init(self, names: list[str], parameters: list[Tensor]) -> Slots:
        self.cut(parameters)
        return with_prefix("rest", self.rest.init(names, parameters))

    def update(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> list[Tensor]:
        updates = self.rest.update(updates, without_prefix("rest", slots), parameters, without_prefix("rest", numbers))
        self.cut(updates)
        return updates

    @torch.no_grad()
    def cut(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.dim() == 2:
                tensor[::2] = 0
