"""Gradient accumulation (Ott et al. 2018): split the effective batch into micro-batches and sum their gradients.

Paper       Ott et al. 2018, Scaling Neural Machine Translation (arXiv 1806.00187), which calls the method "delayed
            updates".
Promise     Activation memory of one micro-batch, and the gradient of the whole batch within rounding. Micro-batches of
            unequal size are weighted correctly.
Use         techniques = ["gradient_accumulation:micro_batches=4"]
            run = thrifty.train(model, texts, held_out=held_out, techniques=techniques, budget="2000 steps")
Start with  `gradient_accumulation:micro_batches=4`. Double `micro_batches` until the step fits in memory.
Cost        More kernel launches, each with less work.
Avoid       A batch that fits in memory as a whole. Contrastive losses are refused, because they compare examples: use
            large_batch.gradient_cache.
Does not    Change the result beyond rounding from a changed summation order, except with BatchNorm.
"""

from dataclasses import replace

import torch
from torch import nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Objective
from thrifty.core.setting_bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique


def accumulated(backward: Backward, micro_batches: int) -> Backward:
    """Return a backward pass that splits the batch into `micro_batches` parts and sums their gradients.

    Parts have equal sizes, except that the last part may be smaller.
    """

    def in_parts(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        rows = -(-len(batch) // micro_batches)
        total = BackwardResult(torch.zeros((), device=batch.weight.device))
        for start in range(0, len(batch), rows):
            part = batch.rows(start, start + rows)
            total = total + backward(model, objective, replace(part, last=batch.last and start + rows >= len(batch)))
        return total

    return in_parts


class GradientAccumulation(Technique):
    """Per-example weights are set for the effective batch. BatchNorm normalizes each micro-batch by the statistics of
    that micro-batch. The numerics of a model with BatchNorm are therefore "different", and `explain`, `plan`, `check`
    and training print the names of its BatchNorm layers."""

    stage, numerics, tolerance = Stage.ACCUMULATE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.MICRO_BATCHES})

    micro_batches: Positive = 4
    """Number of micro-batches per step."""

    def objective(self, objective: Objective) -> Objective:
        if objective.joint:
            raise RefusedError(
                "a loss that compares all examples of a batch cannot be computed on micro-batches",
                fix="--with large_batch.gradient_cache in its place",
            )
        return objective

    def backward(self, backward: Backward) -> Backward:
        return accumulated(backward, self.micro_batches)
