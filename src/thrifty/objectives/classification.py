"""Classification: the cross-entropy of an example's label.

Fields    "inputs" (b, …), of texts those of `labelled_text`; "labels" (b,), or (b, c) where an example has several in
          shares that sum to 1, as mixed images have.
Measures  accuracy: the share of examples whose most likely label is the right one, or the one with the largest share.
          Of all held-out texts together also F1 and the Matthews correlation (scikit-learn).
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
    """The classifier: one of c labels for each image, text or pair of texts. The model's output, or its attribute
    `logits`, is (b, c); or it is one of ours for images, whose hidden states are pooled and given to its head."""

    learns_from, needs_labels, measured = ("images", "labelled_text"), True, ("accuracy",)

    label_smoothing: Probability = 0.0
    """Share of each label that is spread evenly over all classes (Szegedy et al. 2016, arXiv 1512.00567)."""

    labels: tuple[str, ...] = ()
    """Names of the labels of texts; known once the data is open."""

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
            return Prediction(given=model.head(model.pooled(model(batch["inputs"]))))  # type: ignore[operator]
        return Prediction(given=logits_of(model, batch))

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        logits, smoothing = prediction.logits.float(), self.label_smoothing
        return F.cross_entropy(logits, batch["labels"], reduction="none", label_smoothing=smoothing)

    def normalizers(self, prediction: Prediction, batch: Batch) -> Tensor:
        """(b, 1)."""
        return prediction.logits.float().logsumexp(-1, keepdim=True)

    @torch.no_grad()
    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        share, labels = prediction.logits.float().softmax(-1), batch["labels"]
        wanted = labels if labels.ndim > 1 else F.one_hot(labels, share.shape[1]).float()
        wanted = torch.lerp(wanted, torch.full_like(share, 1 / share.shape[1]), self.label_smoothing)
        return (share - wanted).norm(dim=1)

    @torch.no_grad()
    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        labels = batch["labels"]
        right, predicted = labels if labels.ndim == 1 else labels.argmax(1), prediction.logits.argmax(-1)
        rows = {"predicted": predicted, "label": right} if self.collected else {}
        return {"accuracy": (predicted == right).float(), **rows}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return class_scores(rows["label"].numpy(), rows["predicted"].numpy(), self.labels)
