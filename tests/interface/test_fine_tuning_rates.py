"""Learning rate of a pretrained model: of fine-tuning, unless the user or a recipe for pretrained models sets it."""

from pathlib import Path
from typing import Any

import pytest

import thrifty
from thrifty.cli.recipe_options import build_recipe
from thrifty.core.recipe import Recipe
from thrifty.techniques.optimizers.adamw import AdamW

LORA, SET = ("lora",), ("techniques.optimizers.adamw.lr=3e-3",)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return str(tmp_path)


def rate(recipe: Recipe) -> float:
    return next(each.lr for each in recipe.techniques if isinstance(each, AdamW))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 5e-5),
        ({"additions": LORA}, 5e-4),
        ({"lr": 1e-3}, 1e-3),
        ({"assignments": SET}, 3e-3),
        ({"assignments": ("model.reinitialize=true",)}, 2e-3),
        ({"removals": ("adamw",), "additions": ("adamw:lr=7e-4",)}, 7e-4),
        ({"recipe": "instruct"}, 3e-4),
    ],
    ids=str,
)
def test_rate_on_the_command_line(folder: str, options: dict[str, Any], expected: float) -> None:
    assert rate(build_recipe(**{"recipe": "text", "model": folder, **options}).recipe()) == expected


def test_rate_of_a_new_model_and_of_an_own_recipe_file_stays(folder: str, tmp_path: Path) -> None:
    assert rate(build_recipe("text", model="llama-nano").recipe()) == 2e-3
    (tmp_path / "mine.toml").write_text("[techniques.optimizers.adamw]\nlr = 2e-3\n")
    assert rate(build_recipe(str(tmp_path / "mine.toml"), model=folder).recipe()) == 2e-3
    assert rate(thrifty.recipe(folder, "kjv", recipe=str(tmp_path / "mine.toml"))) == 2e-3


def test_rate_in_python(folder: str) -> None:
    assert rate(thrifty.recipe(folder, "kjv", loss="next_token")) == 5e-5
    assert rate(thrifty.recipe(folder, "kjv", loss="next_token", techniques=["lora"])) == 5e-4
    assert rate(thrifty.recipe(folder, "kjv", recipe="text")) == 5e-5
    assert rate(thrifty.recipe("llama-nano", "kjv", recipe="text")) == 2e-3
    assert rate(thrifty.recipe(folder, "kjv", techniques=[thrifty.AdamW(lr=1e-3)])) == 1e-3
    given = thrifty.recipe(recipe="text")
    assert rate(thrifty.recipe(folder, "kjv", recipe=given)) == 2e-3, "a recipe object is the user's"


def test_a_model_of_the_catalogue_has_its_folder() -> None:
    for recipe in (
        build_recipe("text", model="minilm-l6").recipe(),
        thrifty.recipe("minilm-l6", "kjv", loss="masked_token"),
    ):
        assert recipe.model.folder.endswith("minilm-l6") and rate(recipe) == 5e-5
