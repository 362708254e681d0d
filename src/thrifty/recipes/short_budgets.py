"""Recipes with a short budget, in which compilation does not pay."""

from collections.abc import Callable
from dataclasses import replace

from thrifty.core.errors import for_reader
from thrifty.core.recipe import Recipe
from thrifty.techniques.compile import CompiledBlocks


def without_slow_start(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """Return the recipe without compilation if its budget is below `CompiledBlocks.least_seconds` or `least_steps`.
    Budgets of training time keep it, because they do not count compilation."""
    seconds, steps = recipe.budget.seconds, recipe.budget.steps
    setting = "least_steps" if seconds is None else "least_seconds"
    amount = seconds if steps is None else steps
    if amount is None or recipe.budget.counts != "run":
        return recipe
    late = [each for each in recipe.techniques if isinstance(each, CompiledBlocks) and amount < getattr(each, setting)]
    if not late:
        return recipe
    what = f"a minute of its {amount:g} s" if steps is None else f"longer than its {amount:g} steps"
    say(
        f"this run is not compiled, because compilation can take {what}: "
        f"{for_reader(f'--set techniques.compile.{setting}=0')} compiles it"
    )
    return replace(recipe, techniques=tuple(each for each in recipe.techniques if each not in late))
