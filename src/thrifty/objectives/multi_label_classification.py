"""Multi-label classification (no paper): predict any number of classes per text.

Paper       The usual binary cross-entropy of each class, as in Hugging Face transformers.
Promise     The loss of a text is the mean over all classes. The run reports accuracy and, with scikit-learn, macro and
            micro F1.
Use         run = thrifty.train("bert-nano", "topics.jsonl", loss="multi_label_classification", budget="2000 steps")
            print(run.metrics)
Start with  `--set objective.name=multi_label_classification`.
Cost        One logit per class and text.
Avoid       Exactly one label per text: use `classification`.
Does not    Give rare classes more weight, or tune the threshold; a class is predicted if its probability is above 0.5.
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
    """Binary cross-entropy per class, averaged over the c classes. The model returns logits (b, c).

    Fields    the fields of `labelled_text`, and "labels" (b, c) in float32, 1 for a class of the text.
    Metrics   accuracy: fraction of texts with all c classes right. F1 over all held-out texts (scikit-learn).
    """

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
