"""User-defined metrics that are not means over examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class DatasetMetric:
    """A metric of all held-out predictions and labels, such as F1 or a correlation.

    `predict(model, batch)` returns predictions and labels (n, …), with equally many rows. `score(labels, predictions)`
    is called once per evaluation with numpy arrays of all rows and returns a number. Its arguments have the order of
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

    `validate(model)` is called once per evaluation, without gradients and dropout, and returns a number.

    Example::

        run = thrifty.train(…, metrics={"bleu": thrifty.ModelMetric(translate_and_score)})
    """

    validate: Callable[[nn.Module], float]
