"""Number of evaluations in a run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_recipes

from thrifty.core.recipe import Budget, EvaluationSettings, Recipe
from thrifty.training.evaluation import caution_on_patience, evaluation_interval
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


def test_patience_counts_the_evaluations_of_the_recipe() -> None:
    recipe = Recipe(evaluation=EvaluationSettings(every=100, patience=2), budget=Budget(steps=200))
    assert evaluation_interval(recipe, 200) == 100


def test_records_have_ten_evaluations(tmp_path: Path) -> None:
    recipe = tiny_recipes.text(tmp_path, budget=Budget(steps=40))
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, every=1000, examples=1))
    train(recipe, tmp_path, quiet=True)
    lines = (tmp_path / recipe.name / "records.jsonl").read_text().splitlines()
    steps = [each["step"] for each in map(json.loads, lines) if each["kind"] == "evaluation"]
    assert steps == [4, 8, 12, 16, 20, 24, 28, 32, 36, 40]


@pytest.mark.parametrize(("steps", "every", "is_named"), [(100, 100, True), (200, 100, True), (201, 100, False)])
def test_patience_without_enough_evaluations_is_said(steps: int, every: int, is_named: bool) -> None:
    recipe = Recipe(evaluation=EvaluationSettings(every=every, patience=2), budget=Budget(steps=steps))
    assert bool(caution_on_patience(recipe, steps)) == is_named
    assert not is_named or f'evaluation.every": {steps // 8}' in caution_on_patience(recipe, steps)
    assert not caution_on_patience(Recipe(budget=Budget(steps=steps)), steps)
