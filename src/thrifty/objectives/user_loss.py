"""A loss of the user's own: a function of the model and a batch in the user's form."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Objective, Prediction
from thrifty.objectives.user_metrics import DatasetMetric, ModelMetric

UserFunction = Callable[[nn.Module, Any], Any]
RESERVED = ("loss", "trained_loss", "kind", "step")
"""Names that the record of an evaluation has itself."""
UserMetric = UserFunction | DatasetMetric | ModelMetric


@dataclass
class UserPrediction(Prediction):
    """Losses of a model, and the model itself, which metrics call again."""

    model: nn.Module = field(default_factory=nn.Module, repr=False)


class UserLoss(Objective):
    """`loss(model, batch)` returns one loss for each example (b,), or losses and weights of its parts (b, …) each, such
    as tokens, or a mean. With weights the loss of an effective batch is the weighted mean of all its parts, so that
    parts and not examples count alike. A mean is taken for what it is: micro-batches of unequal size and examples of
    unequal weight are refused, and an evaluation leaves out a last batch that is smaller.

    `metrics` are functions of the same arguments and results, or metrics of all examples together. A budget counts an
    example as `example_unit`, such as the tokens of a text.
    """

    learns_from = ()
    may_weigh_parts = True

    def __init__(
        self,
        loss: UserFunction,
        assembled: Callable[[Batch], Any],
        metrics: Mapping[str, UserMetric] | None = None,
        example_unit: int = 1,
    ):
        self.loss, self.assembled, self.example_unit = loss, assembled, example_unit
        for name in metrics or {}:
            if not name.isidentifier() or name in RESERVED:
                raise UsageError(
                    f"a metric cannot be called {name!r}",
                    fix="give it a name of letters, digits and underscores that records have not yet, such as 'f1'",
                )
        kinds = DatasetMetric, ModelMetric
        self.means = {name: each for name, each in (metrics or {}).items() if not isinstance(each, kinds)}
        self.of_all = {name: each for name, each in (metrics or {}).items() if isinstance(each, DatasetMetric)}
        self.of_model = {name: each for name, each in (metrics or {}).items() if isinstance(each, ModelMetric)}
        self.measured, self.summarized = tuple(self.means), (*self.of_all, *self.of_model)
        self.collected = tuple(row for name in self.of_all for row in _rows_of(name))

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        values, weights = _per_example(self._called(self.loss, model, batch, "the loss"), batch, "the loss")
        if torch.is_grad_enabled() and not values.requires_grad:
            raise UsageError(
                "the loss has no gradient: it is no function of the model's trained parameters, or was detached",
                fix="return the tensor that the model's output leads to, without .item(), .detach() or torch.no_grad()",
            )
        is_mean = not values.ndim
        losses = values.expand(len(batch)) if is_mean else values
        return UserPrediction(given=losses, part_weights=weights, is_mean=is_mean, model=model)

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return prediction.logits

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(prediction, UserPrediction)
        found = {}
        with torch.no_grad():
            for name, metric in self.means.items():
                values, weights = _per_example(
                    self._called(metric, prediction.model, batch, name), batch, _metric(name)
                )
                found[name] = values if weights is None else torch.stack([values, weights])
            for name, metric in self.of_all.items():
                rows = self._called(metric.predict, prediction.model, batch, name)
                if not isinstance(rows, tuple | list) or len(rows) != 2 or len({len(each) for each in rows}) != 1:
                    raise UsageError(
                        f"{_metric(name)} predicts {_form(rows)}",
                        fix="return predictions and labels, two tensors with as many rows",
                    )
                found |= {key: torch.as_tensor(each) for key, each in zip(_rows_of(name), rows, strict=True)}
        return found

    def tokens(self, batch: Batch) -> int:
        return len(batch) * self.example_unit

    def overall(self, model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, float]:
        scores: dict[str, Any] = {}
        for name, metric in self.of_all.items():
            predictions, labels = (_array(rows[key]) for key in _rows_of(name))
            scores[name] = metric.score(labels, predictions)
        scores |= {name: metric.validate(model) for name, metric in self.of_model.items()}
        for name, score in scores.items():
            try:
                scores[name] = float(score)
            except (TypeError, ValueError):
                raise UsageError(f"{_metric(name)} is {_form(score)}", fix="return a number") from None
        return scores

    def _called(self, function: UserFunction, model: nn.Module, batch: Batch, what: str) -> Any:
        """Call a function of the user's. Raises UsageError if it changes the batch."""
        before = {name: tensor._version for name, tensor in batch.fields.items()}
        result = function(model, self.assembled(batch))
        changed = [name for name, tensor in batch.fields.items() if tensor._version != before[name]]
        if changed:
            raise UsageError(
                f"{what} changes the batch in place (part {changed[0]}), which others read after it",
                fix="change a copy: part = part.clone()",
            )
        return result


def _array(rows: Tensor) -> np.ndarray:
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()


def _metric(name: str) -> str:
    return f"the metric {name!r}"


def _rows_of(name: str) -> tuple[str, str]:
    """Return the names of a metric's predictions and labels among the rows that are collected."""
    return f"{name} predictions", f"{name} labels"


def _form(value: Any) -> str:
    """Describe a result for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


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


def _per_example(result: Any, batch: Batch, what: str) -> tuple[Tensor, Tensor | None]:
    """For each example (b,) in float32 its value, or the weighted sum of its parts and the sum of their weights; for a
    mean a scalar. Raises UsageError for a result of another form."""
    count = len(batch)
    values, weights = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(values, bool | int | float) and not torch.is_grad_enabled():
        values = torch.tensor(float(values), device=batch.weight.device)
    if not isinstance(values, Tensor) or values.is_complex() or (values.ndim and len(values) != count):
        raise UsageError(
            f"{what} of a batch of {count} examples is {_form(values)}",
            fix=f"return one value for each example ({count},), values and weights, or their mean, as a tensor",
        )
    for each in (values, weights):
        if torch.is_grad_enabled() and isinstance(each, Tensor) and each.device != batch.weight.device:
            raise UsageError(
                f"{what} is on {each.device}, and the batch on {batch.weight.device}",
                fix="compute it of the model's output and the batch alone, without .cpu() or .to()",
            )
    if torch.is_grad_enabled() and not values.is_floating_point():
        raise UsageError(
            f"{what} is of whole numbers ({values.dtype}), which have no gradient",
            fix="return the loss itself, a float tensor; a count of mistakes is a metric",
        )
    values = values.float()
    if weights is None:
        return (values.reshape(count, -1).mean(1) if values.ndim else values), None
    if not isinstance(weights, Tensor) or weights.shape != values.shape or not values.ndim:
        raise UsageError(
            f"{what} has values of shape {tuple(values.shape)}, and weights are {_form(weights)}",
            fix="return both with one row for each example and of one shape",
        )
    weights = weights.detach().float()
    if not isinstance(weights, FakeTensor) and not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UsageError(
            f"weights of {what} are negative or not finite, such as {_wrong(weights):g}",
            fix="return weights from 0 on, such as (labels != -100).float()",
        )
    # a part that does not count may have no finite value, such as a mean over nothing
    values = torch.where(weights > 0, values, 0.0)
    return (values * weights).reshape(count, -1).sum(1), weights.reshape(count, -1).sum(1)


def _wrong(weights: Tensor) -> float:
    return weights[~(weights.isfinite() & (weights >= 0))].flatten()[0].item()
