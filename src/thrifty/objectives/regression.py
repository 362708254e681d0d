"""Regression: the squared error of a number predicted from a text or a pair of texts, as of STS-B.

Fields    those of `labelled_text`; "labels" (b,) in float32.
Measures  Pearson and Spearman correlations of all predictions and labels (scipy).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Prediction
from thrifty.objectives.labelled_text import LabelledTextObjective, correlations


@dataclass(frozen=True)
class Regression(LabelledTextObjective):
    """A number for each text; the model's logits are (b, 1), or (b,)."""

    label_form = "number"
    loss_in = "mean squared error"
    collected, summarized = ("predicted", "label"), ("pearson", "spearman")

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return (_numbers(prediction) - batch["labels"]).square()

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return 2 * (_numbers(prediction) - batch["labels"]).abs()

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {"predicted": _numbers(prediction), "label": batch["labels"]}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return correlations(rows["label"].numpy(), rows["predicted"].numpy())


def _numbers(prediction: Prediction) -> Tensor:
    return prediction.logits.float().flatten()
