"""Recipes: functions that return the recipe of a run. Their docstrings contain the command and the expected result.

Experiments with many runs are studies, see `experiments/studies`.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from thrifty import techniques
from thrifty.core.errors import UsageError, did_you_mean, spelled
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
    """Return recipe layers whose lowest layer is a named recipe or a TOML file.

    Raises UsageError for an unknown name, a missing file, a run, or a name in `studies`.
    """
    if name_or_path in RECIPES:
        return RecipeLayers.above(origin, RECIPES[name_or_path]())
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.exists():
        if not path.is_file():
            of_run = path / "recipe.toml"
            fix = f"pass {of_run}" if of_run.is_file() else "thrifty list recipes"
            raise UsageError(f"there is no recipe file {str(path)!r}", fix)
        return RecipeLayers().override(origin, read_tables(path))
    if name_or_path in studies:
        raise UsageError(f"{name_or_path!r} is a study of many runs, not a recipe", fix=f"thrifty study {name_or_path}")
    of_run = Path("runs", name_or_path, "recipe.toml")
    if of_run.is_file():
        raise UsageError(f"{name_or_path!r} is a run, not a recipe", fix=f"pass {of_run}")
    if techniques.is_name(name_or_path):
        raise UsageError(f"{name_or_path!r} is a technique, not a recipe", fix=f"--with {name_or_path}")
    every = spelled("thrifty list recipes", 'thrifty.list("recipes")')
    raise UsageError(
        f"there is no recipe {name_or_path!r}", fix=did_you_mean(name_or_path, [*RECIPES, *studies], every)
    )
