"""Measurements, reports and refusals of a check."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from careless_techniques import MeanOfMeans
from click.testing import CliRunner
from command_line import settings, write_corpus
from fast_techniques import WITHOUT_FAST
from parallel_work import NormalizedModel
from small_recipes import tiny_digits
from tiny_runs import plain_run, technique, with_optimizer
from torch import nn

from thrifty.checking import promise_check as checking
from thrifty.checking.check_verdicts import PromiseVerdict
from thrifty.checking.label_check import labels
from thrifty.checking.observed_runs import farthest, is_equal, relative
from thrifty.checking.promise_check import check, check_run
from thrifty.checking.rank_check import smaller_mesh
from thrifty.cli.check import command
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource, WrappedSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.mesh import Mesh
from thrifty.core.objective import Objective, Prediction
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.objectives.chat_answers import ChatAnswers
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.parallelism.replicate import ReplicatedDataParallel


class Scaled(Technique):
    """Technique that multiplies gradients by a factor and does not change the loss."""

    stage, numerics, tolerance = Stage.CLIP, Numerics.EXACT, 0.0

    by: float = 1.0

    def backward(self, backward: Backward) -> Backward:
        def scaled(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            outcome = backward(model, objective, batch)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.by)
            return outcome

        return scaled


class ScaledWithin(Scaled):
    stage, numerics, tolerance = Stage.CLIP, Numerics.ROUNDING, 1e-4


class UnknownScores(WrappedSource):
    """Source whose batches have an unused field of NaN."""

    def __init__(self, source: BatchSource):
        self.source, self.batch = source, source.batch

    def rows(self, step: int, start: int, stop: int) -> Batch:
        batch = self.source.rows(step, start, stop)
        return replace(batch, fields={**batch.fields, "score": torch.full((len(batch),), math.nan)})


class NoisyLoss(NextToken):
    """Objective whose losses are multiplied by random values, in training and evaluation."""

    def losses(self, prediction: Prediction, batch: Batch) -> torch.Tensor:
        losses = super().losses(prediction, batch)
        return losses * (1 + torch.rand_like(losses))


class FromTwelveOn(Technique):
    """Technique that refuses batches of fewer than 12 examples."""

    stage, numerics = Stage.SOURCE, Numerics.DIFFERENT

    def batches(self, source: BatchSource) -> BatchSource:
        if source.batch < 12:
            raise RefusedError(f"a batch of {source.batch} is too small", fix="--set data.batch=12")
        return source


def verdict_of(one: Technique) -> PromiseVerdict:
    results = check_run(plain_run, with_optimizer([one]))
    (verdict,) = [verdict for verdict in results if verdict.about == one.name]
    return verdict


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_micro_batches_with_batch_norm_are_broken(dropout: float) -> None:
    def build() -> nn.Module:
        model = NormalizedModel()
        model.blocks[0].linear = nn.Sequential(nn.Linear(16, 16), nn.Dropout(dropout))
        return model

    plain = replace(plain_run(), build=build)
    results = check_run(lambda: plain, with_optimizer([technique("large_batch.gradient_accumulation")]))
    outcomes = {verdict.promise: verdict.outcome for verdict in results}
    assert "rounding" not in outcomes and outcomes["one big batch"] == "broken"


@pytest.mark.parametrize(("by", "outcome"), [(1.0, "holds"), (1 + 1e-6, "broken")])
def test_exact_promise_requires_equal_bits(by: float, outcome: str) -> None:
    verdict = verdict_of(Scaled(by=by))
    assert (verdict.promise, verdict.outcome) == ("exact", outcome)
    if outcome == "broken":
        assert "the gradient norm of step 1 is" in verdict.measured and verdict.fix == "--without scaled"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("by", "outcome"), [(1.0, "holds"), (1.001, "holds"), (1.01, "broken"), (0.5, "broken")])
def test_rounding_promise_limits_gradient_errors(by: float, outcome: str) -> None:
    verdict = verdict_of(ScaledWithin(by=by))
    assert (verdict.promise, verdict.outcome) == ("rounding", outcome), verdict.measured


def test_relative_error_of_the_worst_gradient() -> None:
    wanted = {"large": torch.tensor([3.0, 4.0]), "small": torch.tensor([0.0, 0.0])}
    assert farthest(wanted, wanted) == (0.0, "")
    distance, whose = farthest({"large": torch.tensor([3.0, 3.0]), "small": torch.tensor([0.0, 0.0])}, wanted)
    assert (distance, whose) == (pytest.approx(0.2), "large")
    distance, whose = farthest({"large": wanted["large"], "small": torch.tensor([0.0, 0.01])}, wanted)
    assert (distance, whose) == (pytest.approx(2.0), "small")
    assert farthest({"small": wanted["small"]}, wanted) == (pytest.approx(1.0), "large")
    assert farthest({"large": torch.tensor([3.0, torch.nan])}, wanted) == (math.inf, "large")
    assert relative(3.0, 4.0) == 0.25 and relative(math.nan, 4.0) == math.inf


def test_nan_equals_nan() -> None:
    values = torch.tensor([math.nan, math.inf, 1.0])
    assert is_equal(values, values.clone())
    assert not is_equal(values, values.flip(0)) and not is_equal(values, values[:2])
    assert not is_equal(values, torch.tensor([math.nan, -math.inf, 1.0]))


def test_nan_in_the_data_breaks_no_promise() -> None:
    results = check_run(lambda: replace(plain_run(), source=UnknownScores(plain_run().source)), with_optimizer([]))
    assert [verdict for verdict in results if verdict.outcome == "broken"] == []


def test_a_loss_that_is_not_finite_is_the_only_fault() -> None:
    def build() -> nn.Module:
        model = plain_run().build()
        nn.init.constant_(next(model.parameters()), math.nan)
        return model

    results = check_run(lambda: replace(plain_run(), build=build), with_optimizer([]))
    faults = [(verdict.promise, verdict.measured) for verdict in results if verdict.outcome == "broken"]
    assert faults == [("it trains", "the loss of step 1 is not finite: nan")]


def test_a_loss_that_draws_random_values_breaks_no_promise() -> None:
    results = check_run(
        lambda: replace(plain_run(), objective=NoisyLoss()),
        with_optimizer([technique("large_batch.gradient_accumulation"), technique("memory.recompute")]),
    )
    assert [verdict for verdict in results if verdict.outcome == "broken"] == []
    reasons = {verdict.promise: verdict.measured for verdict in results if verdict.outcome == "not applicable"}
    assert reasons["rounding"] == reasons["one big batch"] == "the loss draws random values"
    assert {"exact", "resume"} <= {verdict.promise for verdict in results if verdict.outcome == "holds"}


def test_row_without_a_learned_token_is_broken() -> None:
    weight = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]])
    batch = Batch({"targets": torch.ones(2, 3, dtype=torch.int64), "share": weight}, torch.full((2,), 0.5))
    verdict = labels(ChatAnswers(), batch)
    assert verdict.outcome == "broken" and "1 of 2 examples have no learned token" in verdict.measured
    assert labels(ChatAnswers(), batch.rows(0, 1)).outcome == "holds"


def test_unused_parameters_of_the_plain_run_are_named() -> None:
    def with_one_too_many() -> nn.Module:
        model = plain_run().build()
        model.register_parameter("spare", nn.Parameter(torch.ones(3)))
        return model

    results = check_run(lambda: replace(plain_run(), build=with_one_too_many), with_optimizer([]))
    (flow,) = [verdict for verdict in results if verdict.promise == "gradients arrive"]
    assert flow.outcome == "holds" and "1 that are also unused in the plain run (spare)" in flow.measured


def test_frozen_parameters_are_counted_by_technique() -> None:
    results = check_run(plain_run, with_optimizer([technique("adapters.lora")]))
    (flow,) = [verdict for verdict in results if verdict.promise == "gradients arrive"]
    assert "frozen by adapters.lora" in flow.measured


def test_reductions_of_the_recipe_are_reported() -> None:
    checked = check(tiny_digits(), examples=2, steps=3)
    assert checked.cuts == ("3 steps", "an effective batch of 2 examples, not 64")
    assert checked.name == "vit-digits"


def test_batch_is_large_enough_for_the_techniques() -> None:
    recipe = tiny_digits()
    checked = check(replace(recipe, techniques=(*recipe.techniques, FromTwelveOn())))
    assert "an effective batch of 16 examples, not 64" in checked.cuts


def test_mesh_axes_are_reduced_to_two_ranks() -> None:
    recipe = tiny_digits()
    assert smaller_mesh(recipe) == (Mesh(), 1)
    assert smaller_mesh(replace(recipe, techniques=(*recipe.techniques, ReplicatedDataParallel())))[1] == 2
    wide = replace(recipe, mesh=Mesh(replicate=8, tensor=4))
    assert smaller_mesh(wide) == (Mesh(replicate=2, tensor=2), 4)


@pytest.mark.slow
def test_ranks_run_as_processes_by_default() -> None:
    """Only this test starts rank processes like a user's check, with all imports."""
    recipe = tiny_digits()
    (verdict,) = [
        verdict
        for verdict in check(
            replace(recipe, techniques=(*recipe.techniques, ReplicatedDataParallel())), steps=3
        ).verdicts
        if verdict.about == "ranks"
    ]
    assert verdict.outcome == "holds" and verdict.measured.startswith("2 ranks compared with 1")


def test_failing_ranks_are_a_broken_promise() -> None:
    recipe = tiny_digits()
    recipe = replace(recipe, techniques=(*recipe.techniques, ReplicatedDataParallel()))
    (verdict,) = [one for one in check(recipe, start=lambda *document: "rank 1: gone").verdicts if one.about == "ranks"]
    assert verdict.measured == "2 ranks fail: rank 1: gone" and verdict.fix == "--without parallelism.replicate"
    left_out = [one for one in check(recipe, ranks=False).verdicts if one.about == "ranks"]
    assert [one.outcome for one in left_out] == ["not applicable"]


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="too short") as refused:
        check(tiny_digits(), steps=2)
    assert "3" in refused.value.fix


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    write_corpus(tmp_path / "corpus")
    return ["text", "--data", str(tmp_path / "corpus"), *settings(), *WITHOUT_FAST]


def test_command_prints_a_verdict_for_each_promise(words: list[str]) -> None:
    results = CliRunner().invoke(command, [*words, "--with", "memory.recompute"], env={"COLUMNS": "200"})
    assert results.exit_code == 0, results.output
    assert "memory.recompute" in results.stdout and "nothing is broken" in results.stdout
    assert "⟦" in results.stdout and "4 steps, an effective batch of 4 examples, not 8" in results.stdout


def test_command_prints_json_and_exits_with_4_if_broken(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sound = check

    def with_a_bug(recipe: object, **options: object) -> object:
        assert isinstance(recipe, type(tiny_digits()))
        return sound(replace(recipe, techniques=(*recipe.techniques, MeanOfMeans())), **options)  # type: ignore

    monkeypatch.setattr(checking, "check", with_a_bug)
    results = CliRunner().invoke(command, [*words, "--json", "--length", "16"])
    document = json.loads(results.stdout)
    assert results.exit_code == document["exit_code"] == 4 and document["holds"] is False
    assert [one["promise"] for one in document["verdicts"] if one["outcome"] == "broken"] == ["one big batch"]
    assert "examples of 16 tokens, not 32" in document["cuts"]
