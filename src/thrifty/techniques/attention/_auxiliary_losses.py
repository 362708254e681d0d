"""Losses of attention cores: left by each in the forward pass, and added to those of the objective."""

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.modeling.attention_sites import LOSING_CORES


class AuxiliaryLossObjective(WrappedObjective):
    """Another objective plus λ times the mean of the losses (b,) that a model's `LOSING_CORES` leave during its
    forward pass in their attribute `losses`, a list while somebody collects."""

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
            # what is run again in the backward pass leaves nothing
            for core in cores:
                core.losses = None
        if collected:
            prediction.left_loss = torch.stack(collected).mean(0)  # type: ignore[attr-defined]
        return prediction

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses, auxiliary = super().losses(prediction, batch), getattr(prediction, "left_loss", None)
        return losses if auxiliary is None else losses + self.weight * auxiliary
