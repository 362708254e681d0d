"""Regression (no paper): predict one number from a text or a pair of texts.

Paper       The usual squared error. An example task is STS-B (Cer et al. 2017, arXiv 1708.00055).
Promise     The loss is the mean squared error. With scipy, the run reports Pearson and Spearman correlations over all
            held-out texts.
Use         run = thrifty.train("bert-nano", "similarity.csv", loss="regression", budget="2000 steps")
            print(run.metrics)
Start with  `--set objective.name=regression`.
Cost        One output per text.
Avoid       Labels that are class numbers without an order: use `classification`.
Does not    Scale the labels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Prediction
from thrifty.objectives.labelled_text import LabelledTextObjective, correlations


@dataclass(frozen=True)
class Regression(LabelledTextObjective):
    """Squared error of one predicted number per text. The model returns logits (b, 1) or (b,).

    Fields    the fields of `labelled_text`, and "labels" (b,) in float32.
    Metrics   Pearson and Spearman correlations of all predictions and labels (scipy); NaN if either is constant.
    """

    label_form = "number"
    loss_in = "mean squared error"
    collected, summarized = ("predicted", "label"), ("pearson", "spearman")

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return (_outputs(prediction) - batch["labels"]).square()

    def scores(self, prediction: Prediction, batch: Batch) -> Tensor:
        return 2 * (_outputs(prediction) - batch["labels"]).abs()

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        return {"predicted": _outputs(prediction), "label": batch["labels"]}

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        return correlations(rows["label"].numpy(), rows["predicted"].numpy())


def _outputs(prediction: Prediction) -> Tensor:
    return prediction.logits.float().flatten()
