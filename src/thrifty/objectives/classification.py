"""Classification (no paper): predict one label per image, text or pair of texts.

Paper       The usual softmax cross-entropy. Label smoothing is from Szegedy et al. 2016 (arXiv 1512.00567), section 7.
Promise     The run reports accuracy. For texts, with scikit-learn, it also reports F1 and the Matthews correlation over
            the held-out set.
Use         run = thrifty.train("bert-nano", "reviews.csv", loss="classification", budget="2000 steps")
            print(run.metrics)
Start with  `--set objective.name=classification`. Add `--set objective.label_smoothing=0.1` for many noisy classes.
Cost        One logit per class and example.
Avoid       Texts with several labels per text: use `multi_label_classification`.
Does not    Give rare classes more weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction
from thrifty.core.setting_bounds import Probability, check_bounds
from thrifty.objectives.labelled_text import HAS_SCORES, class_scores, logits_of


@dataclass(frozen=True)
class Classification(Objective):
    """Cross-entropy of the label of each image, text or pair of texts.

    Fields    "inputs" (b, …), for texts as in `labelled_text`; "labels" (b,), or label weights (b, c) that sum to 1,
              for mixed images (mixup).
    Metrics   accuracy: fraction of examples whose predicted label is right. For mixed images the right label is the
              label of largest weight. For texts also scikit-learn's F1 and Matthews correlation over the held-out set.

    The model returns logits (b, c), or an object with an attribute `logits`. For image models of `thrifty.models`, the
    classification head is applied to the pooled hidden states.
    """

    learns_from, needs_labels, measured = ("images", "labelled_text"), True, ("accuracy",)

    label_smoothing: Probability = 0.0
    """Fraction of each label that is spread evenly over all classes (Szegedy et al. 2016, arXiv 1512.00567)."""

    labels: tuple[str, ...] = ()
    """Label names of texts, set when the data is opened."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")

    @property
    def collected(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("predicted", "label") if self.summarized else ()

    @property
    def summarized(self) -> tuple[str, ...]:  # type: ignore[override]
        if not self.labels or not HAS_SCORES:
            return ()
        return ("f1_macro", "matthews", "f1") if len(self.labels) == 2 else ("f1_macro", "matthews")

    def with_labels(self, labels: Sequence[str]) -> "Classification":
        return replace(self, labels=tuple(labels))

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if getattr(model, "task", None) == "classification":
            return Prediction(output=model.head(model.pooled(model(batch["inputs"]))))  # type: ignore[operator]
        return Prediction(output=logits_of(model, batch))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        logits, smoothing = prediction.logits.float(), self.label_smoothing
        return F.cross_entropy(logits, batch["labels"], reduction="none", label_smoothing=smoothing)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        """Return the logsumexp of the logits of each example, (b, 1)."""
        return prediction.logits.float().logsumexp(-1, keepdim=True)

    @torch.no_grad()
    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        probabilities, labels = prediction.logits.float().softmax(-1), batch["labels"]
        targets = labels if labels.ndim > 1 else F.one_hot(labels, probabilities.shape[1]).float()
        uniform = torch.full_like(probabilities, 1 / probabilities.shape[1])
        return (probabilities - torch.lerp(targets, uniform, self.label_smoothing)).norm(dim=1)

    @torch.no_grad()
    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        labels = batch["labels"]
        classes, predicted = labels if labels.ndim == 1 else labels.argmax(1), prediction.logits.argmax(-1)
        rows = {"predicted": predicted, "label": classes} if self.collected else {}
        return {"accuracy": (predicted == classes).float(), **rows}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return class_scores(rows["label"].numpy(), rows["predicted"].numpy(), self.labels)
