"""Runs worth repeating, each a function that returns a Recipe; its docstring has the command and what to expect.

Experiments of many runs are studies, in a folder of their own.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.core.recipe import Recipe
from thrifty.recipes import (
    autoencoder_recipes,
    image_text_recipes,
    instruction_recipes,
    language_recipes,
    masked_text_recipes,
    vision_recipes,
)
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import read_tables

RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe.__name__.replace("_", "-"): recipe
    for recipe in (
        language_recipes.text,
        language_recipes.masked,
        masked_text_recipes.mask_more,
        language_recipes.spans,
        masked_text_recipes.mass,
        language_recipes.kjv,
        language_recipes.stdlib,
        language_recipes.plain,
        instruction_recipes.instruct,
        instruction_recipes.instruct_kjv,
        vision_recipes.vit_digits,
        vision_recipes.vit_cifar10,
        autoencoder_recipes.mae_digits,
        autoencoder_recipes.mae_cifar10,
        image_text_recipes.flip_emoji,
    )
}


def load_recipe(name_or_path: str, origin: str, studies: Collection[str] = ()) -> RecipeLayers:
    """Load a recipe by its name here or from a TOML file, as the lowest layer; say so where the name is one of
    `studies`."""
    if name_or_path in RECIPES:
        return RecipeLayers.above(origin, RECIPES[name_or_path]())
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            own = path / "recipe.toml"  # of a run
            fix = f"give {own}" if own.is_file() else "thrifty list shows the recipes by name"
            raise UsageError(f"there is no recipe file {path}", fix)
        return RecipeLayers().override(origin, read_tables(path))
    if name_or_path in studies:
        raise UsageError(f"{name_or_path} is a study of many runs, not a recipe", fix=f"thrifty study {name_or_path}")
    of_run = Path("runs", name_or_path, "recipe.toml")
    if of_run.is_file():
        raise UsageError(f"{name_or_path!r} is a run and no recipe", fix=f"give {of_run}")
    raise UsageError(f"there is no recipe {name_or_path!r}", fix=did_you_mean(name_or_path, [*RECIPES, *studies]))
