"""The counts of a step are kept for later runs that differ only in name, seed and budget."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_recipes import tiny_digits

from thrifty.core.kept_results import keep, kept_path, read_kept
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.techniques.growth.stacking import ProgressiveStacking
from thrifty.training.kept_counts import path_of_counts
from thrifty.training.run_setup import prepare_run
from thrifty.training.trainer import train


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def digits(steps: int = 2, **changes: object) -> Recipe:
    return replace(tiny_digits(), budget=Budget(steps=steps), **changes)


def path_of(recipe: Recipe) -> Path | None:
    return path_of_counts(prepare_run(recipe, quiet=True), recipe_to_data(recipe))


def test_later_run_does_not_count_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(digits(name="first"), tmp_path, quiet=True)
    monkeypatch.setattr("thrifty.training.session_start.explain", None)
    monkeypatch.setattr("thrifty.training.session_start.peak_flops", None)
    second = train(digits(3, name="second", seed=5), tmp_path, quiet=True)
    assert second["predicted_memory"] == first["predicted_memory"]
    explanations = [json.loads((tmp_path / name / "explanation.json").read_text()) for name in ("first", "second")]
    ends = [
        row["settings"].pop("until")
        for each in explanations
        for row in each["techniques"]
        if row["stage"] == "schedule"
    ]
    assert ends == [2, 3], "settings are those of the run"
    assert explanations[0] == explanations[1]


def test_what_changes_counts_changes_the_path() -> None:
    recipe = digits()
    other = {
        "data": replace(recipe, data=replace(recipe.data, batch=recipe.data.batch // 2)),
        "model": replace(recipe, model=replace(recipe.model, preset="vit-micro")),
        "techniques": replace(recipe, techniques=recipe.techniques[:-1]),
    }
    paths = {name: path_of(changed) for name, changed in other.items()} | {"unchanged": path_of(recipe)}
    assert len(set(paths.values())) == len(paths)
    assert path_of(digits(9, seed=3, name="other")) == paths["unchanged"]


def test_lengths_matter_if_the_structure_changes_at_a_step() -> None:
    growing = [ProgressiveStacking(at=(4,)), *tiny_digits().techniques]
    assert path_of(digits(3, techniques=tuple(growing))) != path_of(digits(9, techniques=tuple(growing)))


def test_models_of_users_are_counted_anew() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    assert path_of(digits(objects=UserObjects(model=model))) is None


@pytest.mark.parametrize("content", ["", "[1]", '{"a": '])
def test_damaged_results_are_missing(content: str) -> None:
    path = kept_path("counts", {"a": 1})
    keep(path, {"value": 2})
    assert read_kept(path) == {"value": 2}
    path.write_text(content)
    assert read_kept(path) == {}


def test_nothing_is_kept_without_permission(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    keep(kept_path("counts", {"a": 1}), {"value": 2})
    assert read_kept(kept_path("counts", {"a": 1})) == {}
