"""Runs with a short budget are not compiled, unless the recipe says so."""

from dataclasses import replace

import pytest

from thrifty.core.recipe import Budget, Recipe
from thrifty.recipes.short_budgets import without_slow_start
from thrifty.techniques.compile import CompiledBlocks
from thrifty.techniques.optimizers.adamw import AdamW

RECIPE = Recipe(techniques=(AdamW(), CompiledBlocks(least_seconds=120.0, least_steps=100)))


@pytest.mark.parametrize(
    ("budget", "is_compiled"),
    [
        (Budget(seconds=119.0), False),
        (Budget(seconds=120.0), True),
        (Budget(seconds=45.0, counts="training"), True),
        (Budget(steps=99), False),
        (Budget(steps=100), True),
        (Budget(epochs=1.0), True),
    ],
    ids=str,
)
def test_compilation_depends_on_the_budget(budget: Budget, is_compiled: bool) -> None:
    said: list[str] = []
    kept = without_slow_start(replace(RECIPE, budget=budget), said.append)
    assert kept.techniques == (RECIPE.techniques if is_compiled else (AdamW(),))
    assert bool(said) != is_compiled


def test_a_compilation_that_the_user_adds_is_kept() -> None:
    own = replace(RECIPE, techniques=(AdamW(), CompiledBlocks()), budget=Budget(seconds=10.0))
    assert without_slow_start(own, print) is own
