"""Auxiliary losses of attention cores, added to the losses of the objective."""

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.modeling.attention_cores import LOSING_CORES


class AuxiliaryLossObjective(WrappedObjective):
    """Wrapper of an objective that adds the auxiliary losses of attention cores to its losses.

    It adds λ = `weight` times the mean auxiliary loss of all cores, (b,). In the forward pass each core appends its
    auxiliary loss (b,) to the list `losses`, which exists only during `predict`. Attention in windows has several
    losses per example, which are averaged.
    """

    def __init__(self, inner: Objective, weight: float):
        super().__init__(inner)
        self.weight = weight

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        cores = LOSING_CORES.get(model) or ()
        collected: list[Tensor] = []
        for core in cores:
            core.losses = collected
        try:
            prediction = super().predict(model, batch)
        finally:
            # recomputation in the backward pass appends nothing
            for core in cores:
                core.losses = None
        if collected:
            means = [_per_example(losses, len(batch)) for losses in collected]
            prediction.auxiliary_loss = torch.stack(means).mean(0)  # type: ignore[attr-defined]
        return prediction

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses, auxiliary = super().losses(prediction, batch), getattr(prediction, "auxiliary_loss", None)
        return losses if auxiliary is None else losses + self.weight * auxiliary


def _per_example(losses: Tensor, examples: int) -> Tensor:
    """Return the mean loss (b,) of each example from losses (b · w,) of w sequences per example."""
    return losses.unflatten(0, (examples, -1)).mean(1)
