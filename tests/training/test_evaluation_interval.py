"""Number of evaluations in a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_recipes

from thrifty.core.recipe import Budget, EvaluationSettings, Recipe
from thrifty.training.evaluation import evaluation_interval, note_on_patience
from thrifty.training.trainer import train


@pytest.mark.parametrize(
    ("steps", "every", "interval"),
    [(500, 100, 50), (500, 20, 20), (150, 100, 15), (60, 100, 14), (5, 3, 3)],
    ids=["ten in a run", "more by the recipe", "still cheap", "cost limits them", "recipe's own"],
)
def test_a_run_has_ten_cheap_evaluations(steps: int, every: int, interval: int) -> None:
    recipe = Recipe(evaluation=EvaluationSettings(every=every, examples=64), budget=Budget(steps=steps))
    recipe = replace(recipe, data=replace(recipe.data, batch=32))
    assert evaluation_interval(recipe, steps) == interval


@pytest.mark.parametrize(
    ("steps", "every", "interval", "note"),
    [
        (1000, 100, 100, ""),
        (201, 100, 100, ""),
        (200, 100, 25, "evaluating every 25 steps, not evaluation.every = 100"),
        (34, 100, 4, "evaluating every 4 steps"),
        (34, 5, 5, ""),
        (3, 100, 1, "evaluating every 1 steps"),
        (2, 100, 1, "cannot stop a run of 2 steps"),
    ],
)
def test_patience_can_stop_a_run(steps: int, every: int, interval: int, note: str) -> None:
    recipe = Recipe(evaluation=EvaluationSettings(every=every, patience=2), budget=Budget(steps=steps))
    assert evaluation_interval(recipe, steps) == interval
    assert note in note_on_patience(recipe, steps) and bool(note) == bool(note_on_patience(recipe, steps))
    assert not note_on_patience(Recipe(budget=Budget(steps=steps)), steps)


def test_records_have_ten_evaluations(tmp_path: Path) -> None:
    recipe = tiny_recipes.text(tmp_path, budget=Budget(steps=40))
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, every=1000, examples=1))
    train(recipe, tmp_path, quiet=True)
    lines = (tmp_path / recipe.name / "records.jsonl").read_text().splitlines()
    steps = [each["step"] for each in map(json.loads, lines) if each["kind"] == "evaluation"]
    assert steps == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]
