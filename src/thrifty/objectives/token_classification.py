"""Token classification: the cross-entropy of one label for each word of a text, as of entities or parts of speech.

Fields    those of `labelled_text`; "labels" (b, t), -100 where a token has none: special tokens, and all but the first
          token of a word.
Measures  accuracy over words; F1 of single words over all held-out texts (scikit-learn), not of whole entities.
Note      Every word of the effective batch counts alike, as in transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Prediction
from thrifty.objectives.labelled_text import HAS_SCORES, LabelledTextObjective, logits_of, tag_scores

NO_LABEL = -100


@dataclass(frozen=True)
class TokenClassification(LabelledTextObjective):
    """One of c labels for each word; the model's logits are (b, t, c)."""

    label_form = "tags"
    measured, collected = ("accuracy",), ("predicted", "label")
    summarized = ("f1_macro", "f1_micro") if HAS_SCORES else ()
    may_weigh_parts = True

    labels: tuple[str, ...] = ()
    """Names of the labels; known once the data is open."""

    def with_labels(self, labels: Sequence[str]) -> "TokenClassification":
        return replace(self, labels=tuple(labels))

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(given=logits_of(model, batch), part_weights=(batch["labels"] != NO_LABEL).sum(1).float())

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        """The sum over the words of each text: the mean is over all words together."""
        logits = prediction.logits.float().transpose(1, 2)
        return F.cross_entropy(logits, batch["labels"], reduction="none", ignore_index=NO_LABEL).sum(1)

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        predicted, labels = prediction.logits.argmax(-1), batch["labels"]
        counted = labels != NO_LABEL
        right = ((predicted == labels) & counted).sum(1).float()
        rows = {"predicted": predicted[counted], "label": labels[counted]}
        return {"accuracy": torch.stack([right, counted.sum(1).float()]), **rows}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return tag_scores(rows["label"].numpy(), rows["predicted"].numpy(), self.labels)

    def tokens(self, batch: Batch) -> int:
        """Words with a label."""
        return int((batch["labels"] != NO_LABEL).sum())
