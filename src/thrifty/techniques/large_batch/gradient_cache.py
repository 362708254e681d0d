"""Gradient cache (Gao et al. 2021): split a contrastive batch into micro-batches with the exact gradient.

Paper       Gao et al. 2021, GradCache: Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup (arXiv
            2101.06983).
Promise     The gradient of the whole batch, with the activation memory of one micro-batch. The batch may span several
            ranks.
Use         run = thrifty.train(recipe="flip-emoji", data="captions", techniques=["gradient_cache"], budget="20 epochs")
Start with  `gradient_cache:micro_batches=4`. Double `micro_batches` until the step fits in memory.
Cost        A second forward pass, which adds a third to the computation. The loss of your own model must be a
            `thrifty.EmbeddingLoss`.
Avoid       A batch that fits in memory as a whole. Losses that do not compare examples: use
            large_batch.gradient_accumulation.
Does not    Change the result beyond rounding from a changed summation order; the second forward pass repeats the random
            values of the first, such as dropout masks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.randomness import GeneratorStates
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.core.written_buffers import BufferSnapshot


class VectorGradientObjective(WrappedObjective):
    """Wrapper of an objective whose losses have the gradient `gradient` with respect to the embedding vectors."""

    def __init__(self, inner: Objective, gradient: Tensor):
        super().__init__(inner)
        self.gradient = gradient

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        assert prediction.hidden is not None
        return (prediction.hidden.to(self.gradient.dtype) * self.gradient).flatten(1).sum(1)


def predict_vectors(
    model: nn.Module, objective: Objective, parts: list[Batch]
) -> tuple[Prediction, list[tuple[GeneratorStates, BufferSnapshot]]]:
    """Predict several micro-batches without gradients.

    Return the concatenated prediction, and the states of random generators and buffers before each micro-batch.
    """
    states, hidden = [], []
    with torch.no_grad():
        for part in parts:
            states.append((GeneratorStates([part.weight.device]), BufferSnapshot(model)))
            prediction = objective.predict(model, part)
            assert prediction.hidden is not None
            hidden.append(prediction.hidden)
            states[-1][1].forget_constant()
    return replace(prediction, hidden=torch.cat(hidden)), states


def cached(backward: Backward, micro_batches: int) -> Backward:
    """Return a backward pass of a contrastive loss that splits the batch into `micro_batches` parts.

    Parts have equal sizes, except that the last part may be smaller.
    """

    def in_parts(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        rows = -(-len(batch) // micro_batches)
        split = [batch.rows(start, start + rows) for start in range(0, len(batch), rows)]
        prediction, states = predict_vectors(model, objective, split)
        assert prediction.hidden is not None
        precise = torch.promote_types(prediction.hidden.dtype, torch.float32)
        vectors = prediction.hidden.to(precise).requires_grad_()
        losses = objective.losses(replace(prediction, hidden=vectors), batch)
        loss = (losses * batch.weight).sum()
        (gradient,) = torch.autograd.grad(loss, vectors)
        total = BackwardResult(torch.zeros((), device=batch.weight.device))
        for index, (part, (generators, buffers)) in enumerate(zip(split, states, strict=True)):
            generators.put_back()
            own = VectorGradientObjective(objective, gradient[index * rows : (index + 1) * rows])
            # the gradient already includes the example weights
            unweighted = replace(
                part.weighted(torch.ones_like(part.weight)), last=batch.last and index == len(split) - 1
            )
            with buffers.restored():
                total = total + backward(model, own, unweighted)
        return replace(total, loss=loss.detach())

    return in_parts


class GradientCache(Technique):
    """A step has three parts. First, a forward pass without gradients computes the embedding vectors of all examples.
    Then the loss and its gradient with respect to the vectors are computed. Finally, a second forward pass and a
    backward pass of each micro-batch propagate that gradient into the model."""

    stage, numerics, tolerance = Stage.ACCUMULATE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.MICRO_BATCHES})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.SELECTED_EXAMPLES: "a contrastive loss has no separate score per example",
        Claim.AUXILIARY_LOSSES: "auxiliary losses would be ignored, since only the loss of the vectors has a gradient",
        Claim.HALF_BATCH_GRADIENTS: "the gradient of a contrastive loss is not the sum over two halves of the batch",
    }

    micro_batches: Positive = 4
    """Number of micro-batches per step."""

    def objective(self, objective: Objective) -> Objective:
        if not objective.joint:
            raise RefusedError(
                "losses of single examples need no second forward pass",
                fix="--with large_batch.gradient_accumulation in its place; or, for your own loss that compares "
                "examples, pass loss=thrifty.EmbeddingLoss(…)",
            )
        return objective

    def backward(self, backward: Backward) -> Backward:
        return cached(backward, self.micro_batches)
