"""Gradient accumulation: the effective batch in several smaller ones, gradients summed.

Paper     the delayed updates of Ott et al. 2018, Scaling Neural Machine Translation (arXiv 1806.00187).
Promise   activation memory of one micro-batch at the statistics of the whole batch. Example weights are fixed for the
          effective batch, so unequal micro-batches (the last may be smaller) weigh what they should.
Cost      less work per kernel launch; nothing else.
Does not  change the result beyond the order of summation (numerics: rounding).
Avoid     when the whole batch fits: then it only adds launches. A BatchNorm layer normalizes each micro-batch by its
          own statistics: on a model with one the numerics are "different", and explain, plan, check and the run
          name the layers. Refused for a contrastive loss, whose examples are
          compared with each other: large_batch.gradient_cache takes such a batch in parts.
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
    """A backward pass in `micro_batches` parts of equal size, the last one possibly smaller."""

    def in_parts(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        rows = -(-len(batch) // micro_batches)
        total = BackwardResult(torch.zeros((), device=batch.weight.device))
        for start in range(0, len(batch), rows):
            part = batch.rows(start, start + rows)
            total = total + backward(model, objective, replace(part, last=batch.last and start + rows >= len(batch)))
        return total

    return in_parts


class GradientAccumulation(Technique):
    stage, numerics, tolerance = Stage.ACCUMULATE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.MICRO_BATCHES})

    micro_batches: Positive = 4
    """Micro-batches per step."""

    def objective(self, objective: Objective) -> Objective:
        if objective.joint:
            raise RefusedError(
                "an example's loss depends on all of the batch, and would know a micro-batch alone",
                fix="--with large_batch.gradient_cache in its place: the same gradient in as little memory",
            )
        return objective

    def backward(self, backward: Backward) -> Backward:
        return accumulated(backward, self.micro_batches)
