"""Classification with several labels: the binary cross-entropy of each class, of which a text has any number.

Fields    those of `labelled_text`; "labels" (b, c) in float32, 1 for a class that the text has.
Measures  accuracy: the share of texts of which every class is right; F1 of all held-out texts (scikit-learn).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Prediction
from thrifty.objectives.labelled_text import HAS_SCORES, LabelledTextObjective, several_class_scores


@dataclass(frozen=True)
class MultiLabelClassification(LabelledTextObjective):
    """Any number of c labels for each text; the model's logits are (b, c)."""

    label_form = "classes"
    measured, collected = ("accuracy",), ("predicted", "label")
    summarized = ("f1_macro", "f1_micro") if HAS_SCORES else ()

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        logits = prediction.logits.float()
        return F.binary_cross_entropy_with_logits(logits, batch["labels"], reduction="none").mean(1)

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return (prediction.logits.float().sigmoid() - batch["labels"]).norm(dim=1) / batch["labels"].shape[1]

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        predicted, labels = prediction.logits > 0, batch["labels"] > 0
        return {"accuracy": (predicted == labels).all(1).float(), "predicted": predicted, "label": labels}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return several_class_scores(rows["label"].numpy(), rows["predicted"].numpy())
