"""User-defined losses and metrics: computed exactly, or refused with the fix."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.backward import divided_by_parts, plain_backward
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, UsageError
from thrifty.objectives.user_loss import UserLoss
from thrifty.objectives.user_metrics import DatasetMetric, ModelMetric
from thrifty.techniques.large_batch.gradient_accumulation import accumulated
from thrifty.techniques.losses.z_loss import ZLoss
from thrifty.training.evaluation import evaluate

CPU = torch.device("cpu")
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (12,), generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def batch(weight: Tensor | None = None) -> Batch:
    weight = torch.full((12,), 1 / 12) if weight is None else weight
    return Batch({"x": X[: len(weight)].clone(), "y": Y[: len(weight)].clone()}, weight)


def objective(loss: Any, **metrics: Any) -> UserLoss:
    return UserLoss(loss, lambda rows: dict(rows.fields), metrics)


def mean(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows["x"]), rows["y"])


def each(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows["x"]), rows["y"], reduction="none")


def gradient(loss: Any, micro_batches: int = 1, weight: Tensor | None = None) -> Tensor:
    model = network()
    divided_by_parts(accumulated(plain_backward, micro_batches))(model, objective(loss), batch(weight))
    return model.weight.grad


def halved(model: nn.Module, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = each(model, rows)
    return losses, torch.full_like(losses, 0.5)


def column(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return each(model, rows)[:, None]


@pytest.mark.parametrize("loss", [mean, each, column, halved])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_form_of_loss_has_the_gradient_of_torch(loss: Any, micro_batches: int) -> None:
    model = network()
    mean(model, {"x": X, "y": Y}).backward()
    torch.testing.assert_close(gradient(loss, micro_batches), model.weight.grad)


def test_mean_loss_with_unequal_micro_batches_is_refused() -> None:
    with pytest.raises(RefusedError, match="micro-batches have 3 and 4 examples"):
        gradient(mean, 3, torch.full((11,), 1 / 11))  # 4, 4 and 3
    with pytest.raises(RefusedError, match="sampled with weights"):
        gradient(mean, weight=torch.linspace(0.1, 1, 12))


def test_mean_is_evaluated_over_equal_batches_with_a_note() -> None:
    whole, notes = batch(), []
    parts = [whole.rows(0, 5), whole.rows(5, 10), whole.rows(10, 12)]
    count = lambda model, rows: torch.ones(len(rows["y"]))  # noqa: E731
    evaluation = evaluate(network(), objective(mean, count=count), parts, CPU, notes.append)
    assert evaluation["loss"] == pytest.approx(float(mean(network(), {"x": X[:10], "y": Y[:10]})))
    assert evaluation["count"] == 1 and "the last 2 examples are not counted" in notes[0] and len(notes) == 1
    exact = evaluate(network(), objective(each), parts, CPU, notes.append)
    assert exact["loss"] == pytest.approx(float(mean(network(), {"x": X, "y": Y}))) and len(notes) == 1


def total(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum")


def test_a_sum_is_refused_and_a_mean_is_not() -> None:
    with pytest.raises(UsageError, match=r"the loss of 12 examples is the sum over the examples, .*\n.*reduction"):
        evaluate(network(), objective(total), [batch()], CPU)
    for loss in (mean, each, lambda model, rows: 0 * mean(model, rows)):
        evaluate(network(), objective(loss), [batch()], CPU)


def changing(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    rows["x"].mul_(2)
    return each(model, rows)


def weighted(weight: Any) -> Any:
    return lambda model, rows: (each(model, rows), weight)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, rows: each(model, rows).detach(), "has no gradient"),
        (lambda model, rows: mean(model, rows).item(), "is a float"),
        (lambda model, rows: (model(rows["x"]).argmax(1) == rows["y"]).long().sum(), "has no gradient"),
        (lambda model, rows: model(rows["x"]).argmax(1) != rows["y"], "has dtype torch.bool"),
        (lambda model, rows: each(model, rows)[:5], r"of shape \(5,\)"),
        (lambda model, rows: model(rows["x"]), r"of shape \(12, 3\) and torch.float32, without weights"),
        (lambda model, rows: None, "is a NoneType"),
        (lambda model, rows: {"loss": mean(model, rows)}, "is a dict"),
        (lambda model, rows: each(model, rows).to("meta"), "is on meta, but the batch is on cpu"),
        (lambda model, rows: each(model, rows).to(torch.complex64), "complex64"),
        (changing, r"changes part 'x' of the batch in place"),
        (weighted(torch.ones(11)), r"the weights are a tensor of shape \(11,\)"),
        (weighted(3), "weights are a int"),
        (weighted(torch.full((12,), float("nan"))), "not finite, such as nan"),
        (weighted(torch.full((12,), -1.0)), "negative"),
        (weighted(torch.zeros(12)), "sum to 0"),
        (lambda model, rows: (mean(model, rows), torch.ones(())), "values of shape"),
    ],
)
def test_invalid_loss_is_refused_with_the_fix(loss: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        gradient(loss)
    assert error.value.fix


@pytest.mark.parametrize("loss", [lambda model, rows: rows["label"].mean(), lambda model, rows: rows.x.mean()])
def test_parts_that_a_batch_lacks_are_named(loss: Any) -> None:
    with pytest.raises(UsageError, match="a batch is a dict with the keys x, y"):
        gradient(loss)


def test_errors_below_a_loss_stay_as_they_are() -> None:
    def deeper(rows: dict[str, Tensor]) -> Tensor:
        return rows["label"]

    with pytest.raises(KeyError, match="label"):
        gradient(lambda model, rows: deeper(rows).mean())


def test_part_of_weight_zero_may_have_any_value() -> None:
    def loss(model: nn.Module, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        counts = torch.arange(12) < 6
        return torch.where(counts, each(model, rows), float("nan")), counts

    model = network()
    mean(model, {"x": X[:6], "y": Y[:6]}).backward()
    torch.testing.assert_close(gradient(loss), model.weight.grad)


def test_dataset_metrics_equal_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    whole, model = batch(), network()
    predict = lambda model, rows: (model(rows["x"]).argmax(1), rows["y"])  # noqa: E731
    f1 = DatasetMetric(predict, lambda labels, predictions: metrics.f1_score(labels, predictions, average="macro"))
    size = ModelMetric(lambda model: sum(p.numel() for p in model.parameters()))
    right = lambda model, rows: model(rows["x"]).argmax(1) == rows["y"]  # noqa: E731
    judged = objective(each, f1=f1, right=right, size=size)
    evaluation = evaluate(model, judged, [whole.rows(0, 5), whole.rows(5, 12)], CPU)
    guesses = model(X).argmax(1).numpy()
    assert list(evaluation) == ["loss", "right", "f1", "size"] == ["loss", *judged.metrics]
    assert evaluation["f1"] == metrics.f1_score(Y.numpy(), guesses, average="macro")
    assert evaluation["right"] == pytest.approx(np.mean(guesses == Y.numpy())) and evaluation["size"] == 15


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (DatasetMetric(lambda model, rows: rows["y"], max), "returns a tensor"),
        (DatasetMetric(lambda model, rows: (rows["y"], rows["y"]), lambda *rows: "high"), "is a str"),
        (ModelMetric(lambda model: None), "is a NoneType"),
        (lambda model, rows: model(rows["x"]), "the metric 'm' .* without weights"),
        (lambda model, rows: rows["z"], r"write it as def m\(model, batch\)"),
        (lambda model, rows: "a", "the metric 'm' of a batch of 12 examples is a str"),
    ],
)
def test_invalid_metric_is_refused_with_the_fix(metric: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        evaluate(network(), objective(each, m=metric), [batch()], CPU)
    assert error.value.fix


def in_module(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0]), ignore_index=1)(model(rows["x"]), rows["y"])


@pytest.mark.parametrize("loss", [mean, each, in_module])
def test_z_loss_is_added_to_the_cross_entropy_of_a_function(loss: Any) -> None:
    model, rows = network(), batch()
    plain, changed = objective(loss), ZLoss(coefficient=0.5).objective(objective(loss))
    before, after = (each.losses(each.predict(model, rows), rows).mean() for each in (plain, changed))
    squares = model(X).logsumexp(-1).square()
    weights = torch.tensor([1.0, 0.0, 3.0])[Y] if loss is in_module else torch.ones_like(squares)
    torch.testing.assert_close(after, before + 0.5 * (squares * weights).sum() / weights.sum())


def test_z_loss_of_a_function_without_a_softmax_is_refused() -> None:
    changed = ZLoss().objective(objective(lambda model, rows: model(rows["x"]).square().mean()))
    with pytest.raises(RefusedError, match=r"calls no torch.nn.functional.cross_entropy"):
        changed.predict(network(), batch())
