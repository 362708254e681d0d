"""Recipes from the arguments of `train`, and the objects that they hold."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import user_work

import thrifty
from thrifty.core.errors import UsageError
from thrifty.core.user_objects import UserObjects
from thrifty.recipes.recipe_toml import recipe_from_data, recipe_to_data, write_recipe


def own(**changed: Any) -> thrifty.Recipe:
    return thrifty.recipe(**{**user_work.objects(), "budget": 3, "batch": 16, "name": "own", **changed})


def test_a_recipe_trains_as_the_same_arguments_do(tmp_path: Path) -> None:
    one = thrifty.train(recipe=own(), runs=tmp_path / "recipe", quiet=True)
    other = thrifty.train(**user_work.objects(), budget=3, batch=16, name="own", runs=tmp_path, quiet=True)
    assert one.loss == other.loss and one.folder == tmp_path / "recipe" / "own"


def test_objects_are_in_the_value_and_in_no_file() -> None:
    recipe = own()
    assert recipe.objects.loss is user_work.loss and "objects" not in repr(recipe)
    assert "objects" not in recipe_to_data(recipe) and "NoisySums" in write_recipe(recipe)
    with pytest.raises(UsageError, match="unknown key 'objects'"):
        recipe_from_data({"objects": {}})


def test_a_recipe_read_back_refuses_until_its_objects_are_passed() -> None:
    stored = recipe_from_data(recipe_to_data(own()))
    assert stored == own()
    for names in ((), ("model",)):
        with pytest.raises(UsageError, match="user_work:build"):
            stored.refuse_missing_objects(*names)
    replace(stored, objects=own().objects).refuse_missing_objects()
    replace(stored, objects=UserObjects(user_work.build)).refuse_missing_objects("model")


def test_what_is_passed_takes_the_place_of_what_the_recipe_has() -> None:
    changed = thrifty.recipe("gpt2-nano", "corpus.txt", loss="next_token", recipe=own(), seed=3)
    assert changed.objects == UserObjects(metrics=own().objects.metrics)
    changed.refuse_missing_objects()
    assert changed.python == changed.objects.described
    assert (changed.model.preset, changed.data.source, changed.seed, changed.name) == (
        "gpt2-nano",
        "corpus.txt",
        3,
        "own",
    )


def test_a_module_is_where_training_starts_and_is_left_as_it_was(tmp_path: Path) -> None:
    model = user_work.build()
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[operator, union-attr]
    run = thrifty.train(recipe=own(model=model), techniques=[thrifty.Sgd(lr=1e-9)], runs=tmp_path, quiet=True)
    assert float(run.model[0].weight.abs().max()) < 1e-6  # type: ignore[index]
    assert not model[0].weight.any()  # type: ignore[operator, union-attr]
