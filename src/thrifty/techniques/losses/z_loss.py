"""z-loss: pull the logarithm of the softmax's normaliser towards zero.

Paper     de Brébisson & Vincent 2016, The Z-loss (arXiv 1604.08859); coefficient 1e-4 after Chowdhery et al. 2022,
          PaLM (arXiv 2204.02311), section 5.
Promise   logits do not drift, which keeps long low-precision runs stable.
Cost      the loss's backward pass works through the vocabulary a second time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique


class WithZLoss(Objective):
    """Another objective plus coefficient · mean over the example's predictions of log(normaliser)²."""

    def __init__(self, inner: Objective, coefficient: float):
        self.inner, self.coefficient = inner, coefficient

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return self.inner.predict(model, batch)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        losses = self.inner.losses(prediction, batch)
        return losses + self.coefficient * self.inner.normalizers(prediction, batch).square().mean(-1)

    def tokens(self, batch: Batch) -> int:
        return self.inner.tokens(batch)

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return self.inner.scores(prediction, batch)

    def compiled(self, compile: Callable[[Callable], Callable]) -> Objective:
        return WithZLoss(self.inner.compiled(compile), self.coefficient)


@dataclass(frozen=True)
class ZLoss(Technique):
    stage, numerics = Stage.OBJECTIVE, Numerics.DIFFERENT

    coefficient: float = 1e-4

    def objective(self, objective: Objective) -> Objective:
        return WithZLoss(objective, self.coefficient)
