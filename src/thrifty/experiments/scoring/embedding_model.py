"""Loader for the trained model that computes example embeddings."""

from pathlib import Path

from torch import nn

from thrifty.core.errors import UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import ModelSettings, Recipe
from thrifty.data.data_cache import file_sha256
from thrifty.data.run_data import RunData
from thrifty.data.run_metadata import read_model_spec
from thrifty.data.tokenizer import TOKENIZER
from thrifty.models import build_model_for
from thrifty.recipes.recipe_toml import recipe_from_data
from thrifty.training.trained_model import load_trained_model, stored_recipe


def load_embedding_model(folder: Path, recipe: Recipe, data: RunData) -> nn.Module:
    """Return the model of a run folder, or of a folder in Hugging Face layout.

    If the run trained a user's own model, the model object of `recipe` is used. Raises UsageError if the inputs of the
    model do not match `data`.
    """
    if not (folder / "recipe.toml").is_file():
        if not (folder / "config.json").is_file():
            raise UsageError(f"'{folder}' is neither a run folder nor a model folder", fix="--embed-with runs/NAME")
        return build_model_for(data.ends, ModelSettings(folder=str(folder)), recipe.seed, task=recipe.objective.name)  # type: ignore[arg-type]
    there, here = read_model_spec(folder, recipe), data.ends
    if isinstance(there, ImageModelSpec) and isinstance(here, ImageModelSpec):
        if (there.side, there.channels) != (here.side, here.channels):
            raise UsageError(
                f"'{folder}' expects images of {there.side} pixels and {there.channels} channels, but the data have "
                f"{here.side} pixels and {here.channels} channels",
                fix=f"--set data.size={there.side}",
            )
    elif type(there) is not type(here):
        raise UsageError(
            f"'{folder}' was trained on another kind of data than {recipe.data.source!r}",
            fix="choose another model: --embed-with runs/NAME",
        )
    elif file_sha256(folder / TOKENIZER) != data.identity.get(TOKENIZER):
        raise UsageError(
            f"'{folder}' was trained with another tokenizer", fix=f"--set data.tokenizer={folder / TOKENIZER}"
        )
    is_own = bool(recipe_from_data(stored_recipe(folder)).model.build)
    own = recipe.objects.of_model() if is_own else None
    return load_trained_model(folder, objects=own)[0]
