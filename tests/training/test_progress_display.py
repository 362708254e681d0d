"""The progress line of a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny_recipes

from thrifty.interface.run_endings import ending
from thrifty.training.progress_display import StepProgress, line
from thrifty.training.trainer import train


def test_the_last_line_has_the_final_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipes.text(tmp_path)
    summary = train(replace(recipe, evaluation=replace(recipe.evaluation, every=1)), tmp_path)
    lines = [each for each in capsys.readouterr().err.splitlines() if each.startswith("step ")]
    assert f"step {summary['steps']}/{summary['steps']} · " in lines[-1]
    assert f" · held-out {summary['held_out_loss']:.3f} · " in lines[-1]


def test_an_evaluation_of_an_earlier_step_names_its_step() -> None:
    progress = StepProgress(7, 9, 0.5, 0.75, 7, 10.0, None, 1e9, None, 3.0, measured={"accuracy": 0.5})
    assert " · held-out 0.750, accuracy 0.5 · " in line(progress)
    assert " · held-out 0.750, accuracy 0.5 after step 5 · " in line(replace(progress, evaluated_step=5))


def test_an_interrupted_run_names_the_step_of_its_evaluation(tmp_path: Path) -> None:
    recipe = tiny_recipes.text(tmp_path)
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, every=2))
    summary = train(recipe, tmp_path, observers=[lambda record: record.step < 3], quiet=True)
    assert summary["steps"] == 3 and summary["evaluated_step"] == 2
    assert any(each.startswith("held-out loss after step 2 ") for each in ending(summary))
    summary["evaluated_step"] = 3
    assert not any("after step" in each for each in ending(summary))
