"""Next-token prediction (Radford et al. 2018): predict each token of a text from the tokens before it.

Paper       Radford et al. 2018, Improving Language Understanding by Generative Pre-Training, section 3.1, equation 1.
Promise     The loss is the mean cross-entropy per token, in nats. With `data.separate`, documents of a row do not
            attend to each other.
Use         run = thrifty.train("llama-nano", "my.txt", loss="next_token", budget="2000 steps")
            print(run.loss)
Start with  `--set objective.name=next_token`, the default. Add `--set data.separate=true` for short documents.
Cost        One logit per vocabulary entry and token. With a linear head, logits are computed in chunks and not saved.
Avoid       Bidirectional models such as BERT, because their attention sees the token to predict.
Does not    Predict the first token of a document if `data.separate` is set; all other tokens have the same weight.
"""

import inspect
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, class_name
from thrifty.core.objective import Prediction
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy, prediction_of

LABELS = ("targets", "target", "labels", "label", "y")
"""Argument names that mean labels. Such an argument does not receive the document number of each token."""


@dataclass(frozen=True)
class NextToken(TokenCrossEntropy):
    """Cross-entropy of each token after the first.

    Fields    "tokens" (b, t+1).

    With `data.separate`, documents of a row get separate attention and positions, as packed conversations do. The first
    token of a document is then not predicted from the previous document. All predictions of an effective batch have the
    same weight.
    """

    boundary: int | None = None
    """End-of-document token if `data.separate` is set; otherwise None."""

    @property
    def may_weigh_parts(self) -> bool:  # type: ignore[override]
        return self.boundary is not None

    def kept_apart(self, end_of_text: int) -> Self:
        return replace(self, boundary=end_of_text)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        inputs = batch["tokens"][:, :-1]
        if self.boundary is None:
            return prediction_of(model, model(inputs))
        _check_document_argument(model)
        prediction = prediction_of(model, model(inputs, document_numbers(inputs, self.boundary)))
        prediction.part_weights = (inputs != self.boundary).sum(1).float()
        return prediction

    def shares(self, batch: Batch) -> Tensor | None:
        """Return the weight of each prediction, (b, t): 0 for a document's first token, else 1.

        Return None if documents are not separate. With weights, the loss of an example is a sum, and the trainer
        divides the sums by the `part_weights` of all examples.
        """
        return None if self.boundary is None else (batch["tokens"][:, :-1] != self.boundary).float()

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()


def _check_document_argument(model: nn.Module) -> None:
    """Raise RefusedError if the second argument of a model cannot be the document number of each token."""
    try:
        parameters = [*inspect.signature(model.forward).parameters.values()]
    except ValueError:  # compiled functions have no signature
        return
    positional = [each for each in parameters if each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    is_variadic = any(each.kind is each.VAR_POSITIONAL for each in positional)
    if is_variadic or (len(positional) > 1 and positional[1].name not in LABELS):
        return
    names = ", ".join(each.name for each in parameters)
    raise RefusedError(
        f"data.separate is set, but {class_name(model)}.forward({names}) does not take document numbers",
        fix="add a second argument, integers (b, t), and let tokens attend only to equal integers; or leave "
        "data.separate out",
    )


def document_numbers(tokens: Tensor, boundary: int) -> Tensor:
    """Return the document number of each token in its row, (b, t), counted from 1.

    A boundary token belongs to the document that it ends.
    """
    ends = (tokens == boundary).long()
    return ends.cumsum(1) - ends + 1
