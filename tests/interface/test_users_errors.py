"""Errors of a user's metrics and observers come early, lose no step, and can be corrected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import user_work
from torch import Tensor, nn
from torch.nn import functional as F

import thrifty
from thrifty.core.errors import UsageError


def train(runs: Path, **changed: Any) -> thrifty.RunResult:
    options = {"techniques": [thrifty.AdamW(lr=1e-2)], "budget": 6, "batch": 16, "runs": runs, "quiet": True}
    return thrifty.train(**{**user_work.objects(), **options, **changed})


def wrong(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    raise ZeroDivisionError("a fault of the metric")


def test_metrics_are_tried_before_the_first_step(tmp_path: Path) -> None:
    records: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, metrics={"wrong": wrong}, observers=[records.append])
    assert not records


def predicted(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["x"]).argmax(-1), batch["y"]


def undefined(labels: Any, predictions: Any) -> float:
    raise ValueError("only one class is present")


def share(labels: Any, predictions: Any) -> float:
    return float((labels == predictions).mean())


def test_a_corrected_metric_resumes_after_its_error(tmp_path: Path) -> None:
    settings = {"evaluation.every": 3}
    with pytest.raises(ValueError, match="only one class"):
        train(tmp_path, name="own", metrics={"share": thrifty.DatasetMetric(predicted, undefined)}, settings=settings)
    objects = {**user_work.objects(), "metrics": {"share": thrifty.DatasetMetric(predicted, share)}}
    run = thrifty.resume(tmp_path / "own", **objects, quiet=True)
    whole = train(tmp_path, name="whole", metrics=objects["metrics"], settings=settings)
    assert run.loss == whole.loss and run.metrics == whole.metrics
    assert evaluations(run) == evaluations(whole) and len(evaluations(run)) == 2


def evaluations(run: thrifty.RunResult) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (run.folder / "records.jsonl").read_text("utf-8").splitlines()]
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "evaluation"]


def test_an_observers_error_loses_no_step(tmp_path: Path) -> None:
    def observe(record: Any) -> None:
        if record.step == 4:
            raise OSError("the tracker is gone")

    with pytest.raises(OSError, match="tracker"):
        train(tmp_path, name="own", observers=[observe])
    steps: list[int] = []
    run = thrifty.resume(
        tmp_path / "own", **user_work.objects(), observers=[lambda record: steps.append(record.step)], quiet=True
    )
    assert steps == [5, 6] and run.loss == train(tmp_path, name="whole").loss


@pytest.mark.parametrize(
    ("changed", "fix"),
    [({"metrics": [user_work.accuracy]}, 'metrics={"accuracy": …}'), ({"observers": print}, "observers=[function]")],
)
def test_single_functions_are_refused_with_the_fix(changed: dict[str, Any], fix: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        train(tmp_path, **changed)
    assert error.value.fix == fix


class Masked(nn.Module):
    """A model that reads values, so it does not run without them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = user_work.build_plain()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * float(x.abs().max() > 0))


def test_sums_of_models_that_read_values_are_refused(tmp_path: Path) -> None:
    def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")

    with pytest.raises(UsageError, match="is the sum over the examples"):
        train(tmp_path, model=Masked, loss=summed)


@pytest.mark.parametrize(("name", "rate"), [("", 1e-3), ("my-weights", 5e-5)])
def test_modules_with_trained_weights_get_a_small_rate(name: str, rate: float) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **sizes))
    model.config._name_or_path = name
    model.eval()  # as from_pretrained returns it
    rows = [{"input_ids": torch.ones(4).long(), "labels": torch.tensor(0)}] * 32
    recipe = thrifty.recipe(model, rows, held_out=rows, budget=2)
    assert [each.lr for each in recipe.techniques if isinstance(each, thrifty.AdamW)] == [rate]
    lora = thrifty.recipe(model, rows, held_out=rows, budget=2, techniques=["lora"])
    assert [each.lr for each in lora.techniques if isinstance(each, thrifty.AdamW)] == [5e-4 if name else 1e-3]


@pytest.mark.parametrize(
    ("loss", "call"),
    [
        (nn.CrossEntropyLoss(), "nn.CrossEntropyLoss()(model(batch['x']), batch['y'])"),
        (F.cross_entropy, "nn.functional.cross_entropy(model(batch['x']), batch['y'])"),
    ],
    ids=["module", "function"],
)
def test_a_loss_of_torch_is_refused_with_its_call(loss: Any, call: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        train(tmp_path, loss=loss)
    assert error.value.fix == f"write it as def loss(model, batch): return {call}"
    own = {"loss": lambda model, batch: eval(call)}  # noqa: S307
    assert train(tmp_path, **own).loss > 0
