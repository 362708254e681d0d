"""Recipes with a short time budget, in which compilation does not pay."""

from collections.abc import Callable
from dataclasses import replace

from thrifty.core.recipe import Recipe
from thrifty.techniques.compile import CompiledBlocks


def without_slow_start(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """Return the recipe without compilation if its time budget is below `CompiledBlocks.least_seconds`. Budgets of
    training time keep it, because they do not count compilation."""
    seconds = recipe.budget.seconds
    if seconds is None or recipe.budget.counts != "run":
        return recipe
    late = [each for each in recipe.techniques if isinstance(each, CompiledBlocks) and seconds < each.least_seconds]
    if not late:
        return recipe
    say(
        f"this run is not compiled, because compilation can take a minute of its {seconds:g} s: "
        "--set techniques.compile.least_seconds=0 compiles it"
    )
    return replace(recipe, techniques=tuple(each for each in recipe.techniques if each not in late))
