"""Next token: at each position, the cross-entropy of the token that follows.

Fields    "tokens" (b, t+1).
Note      Documents that are kept apart (`data.separate`) are learned as if each were alone: by the mask and positions
          of conversations, and without a prediction of the first token from the document before it. All predictions of
          an effective batch then count alike.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError
from thrifty.core.objective import Prediction
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy, prediction_of

LABELS = ("targets", "target", "labels", "label", "y")
"""Names of a second argument that is something else."""


@dataclass(frozen=True)
class NextToken(TokenCrossEntropy):
    """The language model: each token from those before it."""

    boundary: int | None = None
    """The token that ends a document, where documents are kept apart."""

    @property
    def may_weigh_parts(self) -> bool:  # type: ignore[override]
        return self.boundary is not None

    def kept_apart(self, end_of_text: int) -> Self:
        return replace(self, boundary=end_of_text)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        read = batch["tokens"][:, :-1]
        if self.boundary is None:
            return prediction_of(model, model(read))
        _refuse_deaf(model)
        prediction = prediction_of(model, model(read, document_numbers(read, self.boundary)))
        prediction.part_weights = (read != self.boundary).sum(1).float()
        return prediction

    def shares(self, batch: Batch) -> Tensor | None:
        """1 for a prediction that counts: the losses are sums, divided by the weights of all parts together."""
        return None if self.boundary is None else (batch["tokens"][:, :-1] != self.boundary).float()

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()


def _refuse_deaf(model: nn.Module) -> None:
    """Raise RefusedError for a model whose second argument cannot be the document of each token."""
    try:
        taken = [*inspect.signature(model.forward).parameters.values()]
    except ValueError:  # of a compiled function
        return
    places = [each for each in taken if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    many = any(each.kind is each.VAR_POSITIONAL for each in places)
    if many or (len(places) > 1 and places[1].name not in LABELS):
        return
    raise RefusedError(
        f"data.separate is set, and {type(model).__name__}.forward({', '.join(each.name for each in taken)}) does not "
        "take the document of each token",
        fix="let it take a second argument, whole numbers (b, t), and attend where they are equal; or leave "
        "data.separate out",
    )


def document_numbers(tokens: Tensor, boundary: int) -> Tensor:
    """Return the number of each token's document in its row (b, t), from 1 on; the boundary belongs to what it ends."""
    ends = (tokens == boundary).long()
    return ends.cumsum(1) - ends + 1
