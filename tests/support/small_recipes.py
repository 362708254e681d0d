"""Recipes of the catalogue at sizes that train in milliseconds."""

from dataclasses import replace

from thrifty.core.recipe import Recipe
from thrifty.recipes.vision_recipes import vit_digits
from thrifty.techniques.parallelism.shard import ShardedDataParallel


def tiny_digits() -> Recipe:
    recipe = vit_digits()
    return replace(recipe, model=replace(recipe.model, patch=4, width=32, depth=2, heads=2))


def sharded_digits() -> Recipe:
    recipe = tiny_digits()
    return replace(recipe, techniques=(*recipe.techniques, ShardedDataParallel(gather_dtype="bfloat16")))
