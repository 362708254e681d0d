"""Counting of a step before the runs of a comparison."""

from dataclasses import replace
from pathlib import Path

import pytest
from small_recipes import tiny_digits

from thrifty.comparing.equal_budgets import JUDGED_ON
from thrifty.comparing.run_process import run_to_end
from thrifty.comparing.step_counting import count_run
from thrifty.comparing.variants import Variant
from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.recipe import Budget, EvaluationSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.techniques.compile import CompiledBlocks
from thrifty.techniques.curriculum.patch_size import PatchSizeCurriculum
from thrifty.techniques.curriculum.resolution import ResolutionCurriculum
from thrifty.techniques.growth.stacking import ProgressiveStacking
from thrifty.techniques.large_batch.batch_ramp import BatchRamp
from thrifty.training.run_folder import RunFolder
from thrifty.training.trainer import train


def digits(*techniques: Technique, **budget: float) -> Recipe:
    recipe = tiny_digits()
    quick = EvaluationSettings(every=10_000, examples=64)
    used = (*recipe.techniques, *techniques)
    return replace(recipe, budget=Budget(**(budget or {"steps": 4})), evaluation=quick, techniques=used)


def test_counted_step_equals_a_run(tmp_path: Path) -> None:
    recipe = digits()
    counted = count_run(recipe, tmp_path)
    train(recipe, tmp_path, quiet=True)
    run = RunFolder(tmp_path / recipe.name)
    summary = run.read_json("summary")
    assert (counted.steps, counted.tokens) == (4, summary["tokens"] / 4)
    assert counted.flops == run.read_json("explanation")["footprint"]["flops"]
    assert counted.judged_on == {name: summary[name] for name in JUDGED_ON if name in summary} != {}
    assert not counted.flops_vary


@pytest.mark.parametrize("counted_for", [4, 200])
def test_a_run_without_a_counted_technique_counts_its_own_step(counted_for: int, tmp_path: Path) -> None:
    recipe = digits(CompiledBlocks(least_steps=100), steps=4)
    count_run(replace(recipe, name="variant-1-count", budget=Budget(steps=counted_for)), tmp_path)
    run_to_end(replace(recipe, name="variant-1-seed-0"), tmp_path)
    rows = RunFolder(tmp_path / "variant-1-seed-0").read_json("explanation")["techniques"]
    assert rows and "compile" not in {row["name"] for row in rows}


def test_budgets_of_data_are_counted_in_steps(tmp_path: Path) -> None:
    steps = count_run(digits(epochs=2.0), tmp_path).steps
    assert count_run(digits(epochs=1.0), tmp_path).steps < steps
    assert count_run(digits(tokens=640.0), tmp_path).steps == 640 // tiny_digits().data.batch
    with pytest.raises(InfeasibleError, match="a budget of 3 images is less than one step"):
        count_run(digits(tokens=3.0), tmp_path)


def test_unknown_measure_is_refused(tmp_path: Path) -> None:
    recipe = digits()
    with pytest.raises(UsageError, match=r"evaluation\.judge names no measure of this run: 'acuracy'"):
        count_run(replace(recipe, evaluation=replace(recipe.evaluation, judge="acuracy")), tmp_path)


def test_runs_reuse_the_counted_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = digits()
    count_run(replace(recipe, name="variant-1-count"), tmp_path)
    folders = [RunFolder(tmp_path / name) for name in ("alone", "variant-1-seed-3")]
    alone = replace(Variant("", "", recipe).at_rate(2.0).recipe, name="alone", budget=Budget(steps=6))
    run_to_end(alone, tmp_path)
    monkeypatch.setattr("thrifty.training.session_start.explain", None)
    monkeypatch.setattr("thrifty.training.session_start.peak_flops", None)
    run_to_end(replace(alone, name="variant-1-seed-3"), tmp_path)
    first, second = (folder.read_json("explanation") for folder in folders)
    assert first == second
    assert folders[0].read_json("summary")["held_out_loss"] == folders[1].read_json("summary")["held_out_loss"]


CHANGING: dict[str, Technique] = {
    "structure": ProgressiveStacking(at=(0.5,)),
    "patches": PatchSizeCurriculum(at=(0.5,)),
    "batch": BatchRamp(start=0.25, multiple=1),
    "resolution": ResolutionCurriculum(),
}


@pytest.mark.parametrize("change", CHANGING)
def test_changing_flops_are_found(change: str, tmp_path: Path) -> None:
    assert count_run(digits(CHANGING[change], steps=12), tmp_path).flops_vary


def test_mean_tokens_of_a_growing_batch_are_counted(tmp_path: Path) -> None:
    recipe = digits(BatchRamp(start=0.25, multiple=1), steps=12)
    assert count_run(recipe, tmp_path).tokens == train(recipe, tmp_path, quiet=True)["tokens"] / 12
