"""Token classification (no paper): predict one label per word, such as entity or part of speech.

Paper       The usual cross-entropy per word, as in Hugging Face transformers.
Promise     Every word of the effective batch has the same weight. The run reports accuracy and, with scikit-learn,
            F1 of single words.
Use         run = thrifty.train("bert-nano", "entities.jsonl", loss="token_classification", budget="2000 steps")
            print(run.metrics)
Start with  `--set objective.name=token_classification`.
Cost        One logit per class and token.
Avoid       One label per text: use `classification`.
Does not    Train on special tokens or on a word's tokens after the first, or report F1 of whole entities.
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
    """Cross-entropy of one label per word. The model returns logits (b, t, c) for c classes.

    Fields    the fields of `labelled_text`, and "labels" (b, t): -100 for special tokens and later tokens of a word.
    Metrics   accuracy over words. F1 of single words, not of whole entities, over all held-out texts (scikit-learn).
    """

    label_form = "tags"
    measured, collected = ("accuracy",), ("predicted", "label")
    summarized = ("f1_macro", "f1_micro") if HAS_SCORES else ()
    may_weigh_parts = True

    labels: tuple[str, ...] = ()
    """Label names, set when the data is opened."""

    def with_labels(self, labels: Sequence[str]) -> "TokenClassification":
        return replace(self, labels=tuple(labels))

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return Prediction(output=logits_of(model, batch), part_weights=(batch["labels"] != NO_LABEL).sum(1).float())

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return the loss of each text, (b,): the sum over the words of the text. The trainer divides by the number of
        words."""
        logits = prediction.logits.float().transpose(1, 2)
        return F.cross_entropy(logits, batch["labels"], reduction="none", ignore_index=NO_LABEL).sum(1)

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        predicted, labels = prediction.logits.argmax(-1), batch["labels"]
        counted = labels != NO_LABEL
        correct = ((predicted == labels) & counted).sum(1).float()
        rows = {"predicted": predicted[counted], "label": labels[counted]}
        return {"accuracy": torch.stack([correct, counted.sum(1).float()]), **rows}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return tag_scores(rows["label"].numpy(), rows["predicted"].numpy(), self.labels)

    def tokens(self, batch: Batch) -> int:
        return int((batch["labels"] != NO_LABEL).sum())
