"""Classification: the cross-entropy of an example's label.

Fields    "inputs" (b, …); "labels" (b,), or (b, c) where an example has several in shares that sum to 1, as mixed
          images have.
Measures  accuracy: the share of examples whose most likely label is the right one, or the one with the largest share.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction
from thrifty.core.setting_bounds import Probability, check_bounds


@dataclass(frozen=True)
class Classification(Objective):
    """The classifier: one of c labels for each example. The model's output, or its attribute `logits`, is (b, c); or it
    is one of ours for images, whose hidden states are pooled and given to its head."""

    learns_from, needs_labels, measured = ("images", "text"), True, ("accuracy",)

    label_smoothing: Probability = 0.0
    """Share of each label that is spread evenly over all classes (Szegedy et al. 2016, arXiv 1512.00567)."""

    def __post_init__(self) -> None:
        check_bounds(self, "objective")

    def examples(self, batch: Batch) -> Batch:
        if "labels" not in batch.fields:
            raise UsageError(
                f"the objective classification needs labels, and the data has only {' and '.join(batch.fields)}",
                fix="choose another objective: next_token or masked_token for text",
            )
        return batch

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        output = model(batch["inputs"])
        if getattr(model, "task", None) == "classification":
            return Prediction(given=model.head(model.pooled(output)))  # type: ignore[operator]
        return Prediction(given=getattr(output, "logits", output))

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
        right = labels if labels.ndim == 1 else labels.argmax(1)
        return {"accuracy": (prediction.logits.argmax(-1) == right).float()}
