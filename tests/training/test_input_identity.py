"""Changes of data and given weights between two calls of a comparison, sweep or lottery."""

from pathlib import Path

import pytest
import torch
import user_work
from torch import nn

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings, Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.training.input_identity import input_identity, refuse_changed_inputs


def recipe(model: object = user_work.build, first: int = 0) -> Recipe:
    objects = {"model": model, "data": user_work.NoisySums(200, first), "held_out": user_work.NoisySums(60, 1000)}
    return Recipe("own", data=DataSettings(batch=16), objects=UserObjects(**objects, loss=user_work.loss))  # type: ignore


def identity(**recipes: Recipe) -> dict[str, str]:
    return input_identity(recipes, lambda text: None)


def refuse(before: dict[str, str], now: dict[str, str]) -> None:
    refuse_changed_inputs(Path("runs/race"), before, now, lambda text: None, is_finished=False)


def test_other_examples_have_another_identity() -> None:
    one, other = identity(own=recipe()), identity(own=recipe(first=5000))
    assert one == identity(own=recipe())
    assert {name for name in one if one[name] != other[name]} == {"data"}


def test_given_weights_are_part_of_the_identity() -> None:
    module = nn.Sequential(user_work.build(), nn.BatchNorm1d(2, dtype=torch.bfloat16))
    recipes = {"baseline": recipe(), "given": recipe(module)}
    before = identity(**recipes)
    nn.init.zeros_(module[1].weight)
    with pytest.raises(UsageError, match="'runs/race' was started with other data or weights: weights of given differ"):
        refuse(before, identity(**recipes))


def test_data_that_cannot_be_opened_are_not_compared() -> None:
    assert identity(own=Recipe("own")) == {}
    refuse({"data": "before"}, {})


def test_conjugate_weights_are_hashed() -> None:
    module = nn.Module()
    module.register_buffer("waves", torch.randn(3, dtype=torch.complex64).conj())
    assert identity(own=recipe(module)) == identity(own=recipe(module))
