"""A loss of the user's own: a function of the model and a batch in the user's form."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction

UserFunction = Callable[[nn.Module, Any], Any]


class UserLoss(Objective):
    """`loss(model, batch)` returns one loss for each example (b,), or losses and weights of its parts (b, …) each, such
    as tokens, or a mean. With weights the loss of an effective batch is the weighted mean of all its parts, so that
    parts and not examples count alike; a mean stands for each example of the rows that it was computed of.

    `metrics` are functions of the same arguments and results.
    """

    learns_from = ()
    may_weigh_parts = True

    def __init__(
        self, loss: UserFunction, assembled: Callable[[Batch], Any], metrics: Mapping[str, UserFunction] | None = None
    ):
        self.loss, self.assembled, self.metrics = loss, assembled, dict(metrics or {})
        self.measured = tuple(self.metrics)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        losses, weights = _per_example(self.loss(model, self.assembled(batch)), len(batch), "the loss")
        prediction = Prediction(given=losses, part_weights=weights)
        prediction.model = model  # type: ignore[attr-defined]
        return prediction

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return prediction.logits

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        model, assembled = prediction.model, self.assembled(batch)  # type: ignore[attr-defined]
        found = {}
        with torch.no_grad():
            for name, metric in self.metrics.items():
                values, weights = _per_example(metric(model, assembled), len(batch), f"the metric {name!r}")
                found[name] = values if weights is None else torch.stack([values, weights])
        return found


def loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of `transformers` computes itself of a batch with labels: a mean."""
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"there is no loss, and a batch is a {type(batch).__name__}, not keyword arguments of the model",
            fix="pass loss=, a function of (model, batch)",
        )
    try:
        loss = getattr(model(**batch), "loss", None)
    except TypeError as error:
        raise UsageError(f"there is no loss, and the model takes other arguments: {error}", fix="pass loss=") from error
    if loss is None:
        raise UsageError("there is no loss, and the model's output has none", fix="pass loss=, or batches with labels")
    return loss


def _per_example(result: Any, count: int, what: str) -> tuple[Tensor, Tensor | None]:
    """For each example (b,) in float32 its value, or the weighted sum of its parts and the sum of their weights. Raises
    UsageError for a result of another form."""
    values, weights = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(values, int | float):
        values = torch.tensor(float(values))
    if not isinstance(values, Tensor) or (values.ndim and len(values) != count):
        is_tensor = isinstance(values, Tensor)
        form = f"a tensor of shape {tuple(values.shape)}" if is_tensor else f"a {type(values).__name__}"
        raise UsageError(
            f"{what} of a batch of {count} examples is {form}",
            fix=f"return one value for each example ({count},), values and weights, or their mean",
        )
    values = values.float()
    if weights is not None:
        if weights.shape != values.shape or not values.ndim:
            raise UsageError(
                f"{what} has values of shape {tuple(values.shape)} and weights of shape {tuple(weights.shape)}",
                fix="return both with one row for each example and of one shape",
            )
        weights = weights.float()
        return (values * weights).reshape(count, -1).sum(1), weights.reshape(count, -1).sum(1)
    if not values.ndim:
        return values.expand(count), None
    return values.reshape(count, -1).mean(1), None
