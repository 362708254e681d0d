"""Metrics of the user's own that are no means over examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class DatasetMetric:
    """A metric of all held-out predictions and labels together, such as F1 or a correlation.

    `predict(model, batch)` returns predictions and labels (n, …), as many rows of both. `score(labels, predictions)` is
    called once an evaluation with all of them as numpy arrays, in the order of scikit-learn's metrics, and returns a
    number.

    Example::

        f1 = thrifty.DatasetMetric(lambda model, batch: (model(batch["x"]).argmax(-1), batch["y"]), f1_score)
        run = thrifty.train(…, metrics={"f1": f1})
    """

    predict: Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
    score: Callable[[Any, Any], float]


@dataclass(frozen=True)
class ModelMetric:
    """A metric of the model alone: `validate(model)` is called once an evaluation, without gradients and dropout, and
    returns a number, such as the score of texts that it generates.

    Example::

        run = thrifty.train(…, metrics={"bleu": thrifty.ModelMetric(translate_and_score)})
    """

    validate: Callable[[nn.Module], float]
