"""A model that normalizes over the batch: dividing a batch changes what it computes, and every verb says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import thrifty

PARTS = "large_batch.gradient_accumulation"
WHY = "layer 'norm' normalizes each part of a batch by its own statistics (BatchNorm)"


class Classifier(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 32), norm, nn.Linear(32, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(inputs))))


class FrozenNorm(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> "FrozenNorm":
        return super().train(False)


def over_the_batch() -> nn.Module:
    return Classifier(nn.BatchNorm1d(32))


def of_each_example() -> nn.Module:
    return Classifier(nn.LayerNorm(32))


def frozen() -> nn.Module:
    return Classifier(FrozenNorm(32))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


def work(model: Any, *techniques: Any) -> dict[str, Any]:
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs[:, :3].argmax(1))
    chosen = [thrifty.AdamW(lr=1e-3), *techniques]
    return dict(model=model, data=data, held_out=data, loss=loss, techniques=chosen, budget=4, batch=32, quiet=True)


@pytest.mark.parametrize(
    ("model", "numerics"), [(over_the_batch, "different"), (of_each_example, "rounding"), (frozen, "rounding")]
)
@pytest.mark.parametrize("technique", [PARTS, "measure.noise_scale"])
def test_explain_says_what_parts_change_of_this_model(model: Any, numerics: str, technique: str) -> None:
    rows = thrifty.explain(**work(model, technique)).as_dict()["techniques"]
    assert {row["name"]: row["numerics"] for row in rows}[technique] == numerics


def test_a_run_names_the_layers_and_the_technique(tmp_path: Path) -> None:
    for model, is_said in ((over_the_batch, True), (of_each_example, False)):
        run = thrifty.train(**work(model, PARTS), runs=tmp_path, name=model.__name__)
        assert (f"{PARTS}: {WHY}" in (run.folder / "records.jsonl").read_text()) is is_said


@pytest.mark.parametrize(
    ("model", "techniques", "outcome"),
    [(over_the_batch, [PARTS], "broken"), (over_the_batch, [], "not applicable"), (of_each_example, [PARTS], "holds")],
)
def test_a_check_names_the_layers_as_the_cause(model: Any, techniques: list[str], outcome: str) -> None:
    report = thrifty.check(**work(model, *techniques), ranks=False)
    verdict = next(each for each in report.verdicts if each.promise == "one big batch")
    assert verdict.outcome == outcome and (WHY in verdict.measured) is (model is over_the_batch)
    assert [each.promise for each in report.broken] == ["one big batch"] * (outcome == "broken")
    assert outcome != "broken" or "GroupNorm" in verdict.fix


@pytest.mark.parametrize("allow", ["rounding", "different"])
def test_estimate_and_plan_offer_it_only_if_results_may_differ(allow: Any) -> None:
    wide = thrifty.estimate(Classifier(nn.BatchNorm1d(32)), work(over_the_batch)["data"][:64], loss=loss, memory="1GB")
    limit = 0.9 * wide.peak
    fit = thrifty.estimate(
        Classifier(nn.BatchNorm1d(32)), work(over_the_batch)["data"][:64], loss=loss, memory=limit, allow=allow
    )
    offered = {option.numerics for option in fit.options if PARTS in option.label}
    assert offered == ({"different"} if allow == "different" else set())
    plan = thrifty.plan(**work(over_the_batch), allow=allow, probe=False)
    assert ("changes the result" in plan.rejected[PARTS]) is (allow == "rounding")


def test_ranks_that_differ_are_explained_by_the_layers() -> None:
    report = thrifty.check(**work(over_the_batch, "replicate"))
    found = next(each for each in report.verdicts if each.promise == "one rank or several")
    assert found.outcome == "broken" and WHY in found.measured and "LayerNorm" in found.fix
