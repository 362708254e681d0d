"""Mixed precision: matrix products in bfloat16, parameters, norms, softmax and sums in float32.

Paper     Micikevicius et al. 2018, Mixed Precision Training (arXiv 1710.03740); bfloat16 after Kalamkar et al. 2019
          (arXiv 1905.12322), which needs no loss scaling.
Promise   the matrix rate of the hardware's 16-bit units and about half the activation memory.
Cost      8 bits of mantissa in products; parameters keep float32, so model states do not shrink.
Avoid     on processors without bfloat16 units (`thrifty doctor` tells): there it is slower.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Around, Objective, Prediction
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique


def _autocast(batch: Batch) -> torch.autocast:
    return torch.autocast(batch.weight.device.type, torch.bfloat16)


class InBfloat16(Around):
    """Another objective with the model's forward pass, and its head wherever it is called, under autocast. What
    follows the logits is float32: objectives see to that themselves."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        with _autocast(batch):
            prediction = super().predict(model, batch)
        if prediction.hidden is not None:  # the head's product is one of the matrix products
            prediction.hidden = prediction.hidden.to(torch.bfloat16)
        return prediction

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        with _autocast(batch):
            return super().losses(prediction, batch)

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        with _autocast(batch):
            return super().scores(prediction, batch)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        with _autocast(batch):
            return super().normalizers(prediction, batch)


@dataclass(frozen=True)
class Mixed(Technique):
    stage, numerics = Stage.PRECISION, Numerics.DIFFERENT
    claims = frozenset({"precision"})

    def objective(self, objective: Objective) -> Objective:
        return InBfloat16(objective)
