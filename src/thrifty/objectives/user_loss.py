"""User-defined loss: a function of the model and a batch of any form."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError, reason_of
from thrifty.core.objective import Objective, Prediction
from thrifty.objectives.user_metrics import DatasetMetric, ModelMetric

UserFunction = Callable[[nn.Module, Any], Any]
RESERVED = ("loss", "trained_loss", "kind", "step")
"""Reserved metric names, because evaluation results have keys with these names."""
UserMetric = UserFunction | DatasetMetric | ModelMetric


@dataclass
class UserPrediction(Prediction):
    """Losses of a model, and the model itself. Metrics call the model again."""

    model: nn.Module = field(default_factory=nn.Module, repr=False)


class UserLoss(Objective):
    """Objective of a user-defined loss.

    `loss(model, batch)` returns one of three results:

    - losses (b,), one per example.
    - (losses, weights) of the parts of each example, such as tokens, (b, …) each. The loss of an effective batch is the
      weighted mean of all parts.
    - the mean loss of the batch, a scalar. Micro-batches of unequal size and examples of unequal weight are then
      refused. An evaluation leaves out a last batch that is smaller than the others.

    A metric of `metrics` is a function that returns one of these results; or it is a `DatasetMetric` or a
    `ModelMetric`. A token budget counts each example as `example_unit` tokens.
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
        self.is_checked = False
        for name in metrics or {}:
            if not name.isidentifier() or name in RESERVED:
                raise UsageError(
                    f"a metric cannot be called {name!r}",
                    fix=f"use letters, digits and underscores, such as 'f1', but not {', '.join(RESERVED)}",
                )
        kinds = DatasetMetric, ModelMetric
        self.means = {name: each for name, each in (metrics or {}).items() if not isinstance(each, kinds)}
        self.of_all = {name: each for name, each in (metrics or {}).items() if isinstance(each, DatasetMetric)}
        self.of_model = {name: each for name, each in (metrics or {}).items() if isinstance(each, ModelMetric)}
        self.measured, self.summarized = tuple(self.means), (*self.of_all, *self.of_model)
        self.collected = tuple(row for name in self.of_all for row in _rows_of(name))

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        values, weights = _per_example(self._called(self.loss, model, batch, "the loss"), batch, "the loss")
        refuse_constant(values, "loss")
        is_mean = not values.ndim
        is_evaluated = not (torch.is_grad_enabled() or model.training or isinstance(values, FakeTensor))
        if is_mean and is_evaluated and not self.is_checked:
            self.is_checked = True
            self._refuse_sum(model, batch, values)
        losses = values.expand(len(batch)) if is_mean else values
        return UserPrediction(output=losses, part_weights=weights, is_mean=is_mean, model=model)

    def _refuse_sum(self, model: nn.Module, batch: Batch, whole: Tensor) -> None:
        """Raise UsageError if the loss of a batch is the sum of the losses of its halves, so not a mean."""
        halves = self._of_halves(model, batch)
        if whole and halves and torch.isclose(whole, halves[0] + halves[1], rtol=1e-4):
            raise UsageError(
                f"the loss of {len(batch)} examples is the sum over the examples, {float(whole):.4g}, not the mean",
                fix='return the mean; or one loss per example, such as with reduction="none"',
            )

    def _of_halves(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return the losses of the halves of a batch; None if the batch or the loss cannot be divided."""
        middle, parts = len(batch) // 2, []
        for half in (batch.rows(0, middle), batch.rows(middle, len(batch))) if middle else ():
            try:
                with torch.random.fork_rng():
                    parts.append(_per_example(self.loss(model, self.assembled(half)), half, "the loss")[0])
            except Exception:  # a loss may need whole batches
                return None
        return (parts[0], parts[1]) if parts else None

    def losses(self, prediction: Prediction, batch: Batch) -> Tensor:
        return prediction.logits

    def measures(self, prediction: Prediction, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(prediction, UserPrediction)
        measured = {}
        with torch.no_grad():
            for name, metric in self.means.items():
                values, weights = _per_example(
                    self._called(metric, prediction.model, batch, name), batch, _metric(name)
                )
                measured[name] = values if weights is None else torch.stack([values, weights])
            for name, metric in self.of_all.items():
                rows = self._called(metric.predict, prediction.model, batch, name)
                if not isinstance(rows, tuple | list) or len(rows) != 2 or len({len(each) for each in rows}) != 1:
                    raise UsageError(
                        f"{_metric(name)} returns {form_of(rows)} from `predict`",
                        fix="return predictions and labels, two tensors with the same number of rows",
                    )
                measured |= {key: torch.as_tensor(each) for key, each in zip(_rows_of(name), rows, strict=True)}
        return measured

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
                raise UsageError(f"{_metric(name)} is {form_of(score)}", fix="return a number") from None
        return scores

    def _called(self, function: UserFunction, model: nn.Module, batch: Batch, what: str) -> Any:
        """Return the result of a user's function. Raises UsageError if the function changes the batch."""
        before = {name: tensor._version for name, tensor in batch.fields.items()}
        given = self.assembled(batch)
        try:
            result = function(model, given)
        except RuntimeError as error:  # an evaluation of a function that computes gradients itself
            if torch.is_grad_enabled() or "does not require grad" not in str(error):
                raise
            with torch.enable_grad():
                result = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, function(model, given))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            if not _is_raised_in(function, error):
                raise
            call = _call_of_criterion(function, given) or "…, and read these parts of the batch"
            raise UsageError(
                f"{what} fails with {reason_of(error)!r}; a batch is {_content(given)}",
                fix=f"write it as def {what.removeprefix('the ')}(model, batch): {call}",
            ) from error
        changed = [name for name, tensor in batch.fields.items() if tensor._version != before[name]]
        if changed:
            raise UsageError(
                f"{what} changes part {changed[0]!r} of the batch in place, but the batch is used again later",
                fix="change a copy: part = part.clone()",
            )
        return result


@torch.no_grad()
def explain_parts(objective: Objective, model: nn.Module, batch: Batch, tolerance: float = 2e-5) -> str:
    """Return a sentence if the mean loss of an even number of examples (b, …) is not the mean of the losses of their
    halves, up to the relative `tolerance`; "" otherwise, and for a loss that is no mean, that draws random values, or
    that requires whole batches. The tolerance is small because the losses of all tokens are nearly equal before
    training, whereas their gradients are not."""

    def loss_of(part: Batch) -> float:
        prediction = objective.predict(model, part)
        loss = float(objective.losses(prediction, part).double().mean())
        return loss if prediction.is_mean else math.nan

    middle = len(batch) // 2
    with torch.random.fork_rng():
        whole, again = loss_of(batch), loss_of(batch)
        if whole != again:  # also for NaN
            return ""
        try:
            halves = loss_of(batch.rows(0, middle)), loss_of(batch.rows(middle, len(batch)))
        except Exception:  # a loss may need whole batches
            return ""
    roundings = max((torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()), default=0.0)
    mean, relative = sum(halves) / 2, max(tolerance, 8 * roundings)
    if math.isclose(whole, mean, rel_tol=relative, abs_tol=relative * max(map(abs, halves))):
        return ""
    digits = 8 if math.isclose(whole, mean, rel_tol=1e-3) else 4
    return (
        f"the loss of {len(batch)} examples, {whole:.{digits}g}, is not the mean of the losses of their halves, "
        f"{mean:.{digits}g}, so results differ from the whole batch's; return one loss per example, or (losses, "
        "weights), or for a loss that compares examples a thrifty.EmbeddingLoss"
    )


def refuse_constant(values: Tensor, what: str) -> None:
    """Raise UsageError in a training step if values (b, …) have no gradient."""
    if torch.is_grad_enabled() and not values.requires_grad:
        raise UsageError(
            f"the {what} has no gradient: it was detached, or does not depend on trained parameters",
            fix=f"compute the {what} from the model's output, without .item(), .detach() or torch.no_grad(); for a "
            "frozen model, train parameters: parameter.requires_grad_(True)",
        )


def _array(rows: Tensor) -> np.ndarray:
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()


def _metric(name: str) -> str:
    return f"the metric {name!r}"


def _rows_of(name: str) -> tuple[str, str]:
    return f"{name} predictions", f"{name} labels"


def _is_raised_in(function: UserFunction, error: Exception) -> bool:
    """Return True if a function raised an error itself, such as by reading a part that the batch does not have, or if
    it is a loss of torch, which takes no batch. Errors of deeper calls are the user's own."""
    if _is_criterion(function):
        return True
    called = error.__traceback__.tb_next if error.__traceback__ else None
    return called is None or called.tb_next is None


def _is_criterion(function: UserFunction) -> bool:
    """Return True for a loss of torch, such as `nn.CrossEntropyLoss()` or `F.cross_entropy`."""
    return any(str(getattr(each, "__module__", "")).startswith("torch.") for each in (function, type(function)))


def _call_of_criterion(function: UserFunction, batch: Any) -> str:
    """Return code that calls a loss of torch on the first two parts of a batch; "" for other functions and batches."""
    parts = range(len(batch)) if isinstance(batch, list | tuple) else batch if isinstance(batch, Mapping) else ()
    places = [*map(repr, parts)]
    if len(places) < 2 or not _is_criterion(function):
        return ""
    name = getattr(function, "__name__", "")
    called = f"nn.functional.{name}" if name else f"nn.{type(function).__name__}()"
    return f"return {called}(model(batch[{places[0]}]), batch[{places[1]}])"


def _content(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    return f"a {type(batch).__name__}" + (f" of {len(batch)} parts" if isinstance(batch, list | tuple) else "")


def form_of(value: Any) -> str:
    """Describe a value for a message: a tensor by its shape and dtype, another value by its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss that a model computes for a batch (a dict of its arguments). The output is an object or
    a dict with a loss or, as in `transformers`, a tuple with the loss first.

    Raises UsageError if the batch is not a mapping or the output has no loss.
    """
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"no loss was passed, and a batch is a {type(batch).__name__}, not a dict of the model's arguments",
            fix="pass loss=, a function of (model, batch)",
        )
    try:
        output = model(**batch)
    except TypeError as error:
        raise UsageError(
            f"no loss was passed, and the model does not accept the keys of the batch: {error}",
            fix="pass loss=, a function of (model, batch)",
        ) from error
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not output[0].ndim:
        loss = output[0]
    if loss is None:
        raise UsageError(
            "no loss was passed, and the model's output has no loss",
            fix="pass loss=, a function of (model, batch); or pass batches with labels",
        )
    return loss


def _per_example(result: Any, batch: Batch, what: str) -> tuple[Tensor, Tensor | None]:
    """Convert the result of a user's function to tensors in float32: (values, None) or (sums, weights).

    A weighted result becomes the sums of weight · value and the sums of weights. All are (b,), except that `values` is
    a scalar for a mean. Raises UsageError for a result of any other form.
    """
    count = len(batch)
    values, weights = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(values, bool | int | float) and not torch.is_grad_enabled():
        values = torch.tensor(float(values), device=batch.weight.device)
    if not isinstance(values, Tensor) or values.is_complex() or (values.ndim and len(values) != count):
        raise UsageError(
            f"{what} of a batch of {count} examples is {form_of(values)}",
            fix=f"return a tensor ({count},) of one value per example; or (values, weights); or a scalar mean",
        )
    for each in (values, weights):
        if torch.is_grad_enabled() and isinstance(each, Tensor) and each.device != batch.weight.device:
            raise UsageError(
                f"{what} is on {each.device}, but the batch is on {batch.weight.device}",
                fix="compute it from the model's output and the batch only, without .cpu() or .to()",
            )
    if torch.is_grad_enabled() and not values.is_floating_point():
        raise UsageError(
            f"{what} has dtype {values.dtype}, which has no gradient",
            fix="return a float tensor; or pass the function in metrics=",
        )
    values = values.float()
    if weights is None:
        if values.ndim and values.numel() != count:  # such as logits, whose mean would be trained in silence
            raise UsageError(
                f"{what} of a batch of {count} examples is {form_of(values)}, without weights",
                fix=f"return a tensor ({count},) of one value per example, such as values.flatten(1).mean(1); or "
                "(values, weights) for the weighted mean of all parts",
            )
        return (values.reshape(count) if values.ndim else values), None
    if not isinstance(weights, Tensor) or weights.shape != values.shape or not values.ndim:
        raise UsageError(
            f"{what} has values of shape {tuple(values.shape)}, but the weights are {form_of(weights)}",
            fix="return values and weights of the same shape, with one row per example",
        )
    weights = weights.detach().float()
    if not isinstance(weights, FakeTensor) and not bool((weights.isfinite() & (weights >= 0)).all()):
        raise UsageError(
            f"weights of {what} are negative or not finite, such as {_first_invalid(weights):g}",
            fix="return finite weights of at least 0, such as (labels != -100).float()",
        )
    # the value of a part of weight 0 may be NaN, such as a mean over no tokens
    values = torch.where(weights > 0, values, 0.0)
    return (values * weights).reshape(count, -1).sum(1), weights.reshape(count, -1).sum(1)


def _first_invalid(weights: Tensor) -> float:
    return weights[~(weights.isfinite() & (weights >= 0))].flatten()[0].item()
