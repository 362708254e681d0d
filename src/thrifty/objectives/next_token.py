"""Next token: at each position, the cross-entropy of the token that follows. Fields: "tokens" (b, t+1)."""

from dataclasses import dataclass

from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Prediction
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy, prediction_of


@dataclass(frozen=True)
class NextToken(TokenCrossEntropy):
    """The language model: each token from those before it."""

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return prediction_of(model, model(batch["tokens"][:, :-1]))

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()
