"""Default data parallelism on several ranks."""

from dataclasses import replace

from thrifty.core.ranks import ranks
from thrifty.core.recipe import Recipe
from thrifty.techniques import find


def with_data_parallelism(recipe: Recipe) -> Recipe:
    """Add `parallelism.replicate` to a recipe if there are several ranks and none of its techniques divides work over
    ranks.
    """
    if ranks() == 1 or any(technique.divides_ranks for technique in recipe.techniques):
        return recipe
    return replace(recipe, techniques=(*recipe.techniques, find("parallelism.replicate")()))
