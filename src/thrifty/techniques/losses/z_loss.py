"""z-loss: pull the logarithm of the softmax's normaliser towards zero.

Paper     de Brébisson & Vincent 2016, The Z-loss (arXiv 1604.08859); coefficient 1e-4 after Chowdhery et al. 2022,
          PaLM (arXiv 2204.02311), section 5.
Promise   logits do not drift, which keeps long low-precision runs stable.
Cost      the loss's backward pass works through the vocabulary a second time.
"""

from dataclasses import dataclass

from torch import Tensor

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique


class ZLossObjective(WrappedObjective):
    """Another objective plus coefficient · mean of log(normaliser)² over the example's predictions, each counted as in
    the loss itself."""

    def __init__(self, inner: Objective, coefficient: float):
        super().__init__(inner)
        self.coefficient = coefficient

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = super().losses(prediction, batch)
        squares, shares = self.normalizers(prediction, batch).square(), prediction.shares
        return losses + self.coefficient * (squares.mean(-1) if shares is None else (squares * shares).sum(-1))


@dataclass(frozen=True)
class ZLoss(Technique):
    stage, numerics = Stage.OBJECTIVE, Numerics.DIFFERENT

    coefficient: float = 1e-4

    def objective(self, objective: Objective) -> Objective:
        if objective.joint:
            raise RefusedError(
                "a loss of several examples together has no normaliser of each", fix=f"--without {self.name}"
            )
        plain = type(objective.baseline)
        if plain.normalizers is Objective.normalizers:
            raise RefusedError(
                f"{plain.__name__} has no softmax whose normaliser could drift", fix=f"--without {self.name}"
            )
        return ZLossObjective(objective, self.coefficient)
