"""Models that cannot run on fake tensors are counted on a real batch, trained and planned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.allocator_trace import measure_allocations
from planned_runs import CATALOGUE
from routed_model import VOCABULARY, build
from tiny_runs import corpus, technique, with_optimizer

from thrifty.composition import explain as explaining
from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.explain import explain, touched_modules
from thrifty.core.errors import RefusedError
from thrifty.core.recipe import Budget, DataSettings, EvaluationSettings, Recipe
from thrifty.core.technique import Numerics
from thrifty.core.user_objects import UserObjects
from thrifty.data.text.token_windows import PackedTokens
from thrifty.objectives.next_token import NextToken
from thrifty.planning.plan_search import PlanSearch
from thrifty.planning.planner import allowed_options
from thrifty.simulators.cluster.traced_workload import trace_workload
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.trainer import train

PLAIN = BaseRun(build, PackedTokens(corpus(), 64, 8, seed=0), NextToken())


def run_with(*names: str) -> Run:
    return compose(PLAIN, with_optimizer([technique(name) for name in names]), 2)


@pytest.mark.parametrize(
    "names", [(), ("memory.recompute",), ("memory.offload_optimizer", "large_batch.gradient_accumulation")]
)
def test_footprint_from_a_real_batch_is_noted(names: tuple[str, ...]) -> None:
    run = run_with(*names)
    explanation = explain(run)
    assert explanation.footprint.memory == pytest.approx(measure_allocations(run).peak, rel=0.02)
    assert any("counted on a real batch" in line and "nonzero" in line for line in explanation.decisions)


def test_count_stops_at_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = explain(run_with()).footprint.memory
    monkeypatch.setattr(explaining, "free_memory", lambda device: whole / 2)
    explanation = explain(run_with())
    assert whole / 2 < explanation.footprint.memory < whole
    assert any("no more memory is free" in line for line in explanation.decisions)


def test_touched_modules_of_a_model_that_reads_values() -> None:
    assert touched_modules(run_with("memory.recompute"))["memory.recompute"]


@pytest.mark.parametrize("name", ["memory.activation_budget", "memory.optimal_recompute"])
def test_operation_level_plans_refuse_the_model(name: str) -> None:
    with pytest.raises(RefusedError, match="nonzero"):
        explain(run_with(name))


def test_model_that_reads_values_is_trained(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(corpus().astype("uint8")[:4000]))
    data = DataSettings(source=str(tmp_path / "text.txt"), vocabulary=VOCABULARY, length=16, batch=4)
    evaluation = EvaluationSettings(examples=4)
    recipe = Recipe("routed", data=data, budget=Budget(steps=2), evaluation=evaluation, techniques=(AdamW(),))
    recipe = replace(recipe, objects=UserObjects(model=build))
    assert train(recipe, tmp_path, quiet=True)["status"] == "finished"
    explained = json.loads((tmp_path / "routed" / "explanation.json").read_text())
    assert explained["plain"]["flops"] > 0 and explained["footprint"]["activations"] > 0


def test_plan_leaves_out_techniques_that_refuse_the_model() -> None:
    recipe = Recipe("routed", data=DataSettings(length=64, batch=8), techniques=(AdamW(),))
    options, _ = allowed_options(recipe, PLAIN, CATALOGUE, Numerics.EXACT, "cpu")
    search = PlanSearch(PLAIN, recipe.techniques, 2, {"recomputation": options["recomputation"]})
    assert search.run().options == ()
    assert {way.label.partition(":")[0] for way in search.singles} == {"memory.recompute"}
    assert all("nonzero" in reason for reason in search.refused.values()) and len(search.refused) > 3


def test_simulation_refuses_the_model_by_name() -> None:
    with pytest.raises(RefusedError, match="the model 'routed' reads values of tensors"):
        trace_workload("routed", build, 16)
