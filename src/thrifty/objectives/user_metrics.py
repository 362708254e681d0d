"""User-defined metrics that cannot be computed as means over examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class DatasetMetric:
    """A metric of all held-out predictions and labels, such as F1 or a correlation.

    `predict(model, batch)` returns predictions and labels (n, …) with the same number of rows. Once per evaluation,
    `score(labels, predictions)` receives numpy arrays of all rows and returns a number. Labels come first, as in
    scikit-learn's metrics.

    Example::

        f1 = thrifty.DatasetMetric(lambda model, batch: (model(batch["x"]).argmax(-1), batch["y"]), f1_score)
        run = thrifty.train(…, metrics={"f1": f1})
    """

    predict: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    score: Callable[[Any, Any], float]


@dataclass(frozen=True)
class ModelMetric:
    """A metric of the model, such as the score of generated texts.

    `validate(model)` returns a number. It is called once per evaluation, without gradients or dropout.

    Example::

        run = thrifty.train(…, metrics={"bleu": thrifty.ModelMetric(translate_and_score)})
    """

    validate: Callable[[nn.Module], float]
