"""Reference of the keys of a recipe file."""

from generator.card_pages import attribute_texts, settings_table
from generator.markdown import join, md
from thrifty.core import recipe
from thrifty.core.mesh import Mesh
from thrifty.interface.technique_profiles import settings_of

RECIPE_TABLES = {
    "model": recipe.ModelSettings,
    "data": recipe.DataSettings,
    "data.augment": recipe.AugmentationSettings,
    "objective": recipe.ObjectiveSettings,
    "budget": recipe.Budget,
    "evaluation": recipe.EvaluationSettings,
    "checkpoints": recipe.CheckpointSettings,
    "mesh": Mesh,
}
"""Tables of a recipe file, with the class of each."""


def recipe_schema() -> str:
    """Return the keys of a recipe file, table by table."""
    parts = [
        "# Recipe",
        "A recipe is a TOML file: `thrifty plan kjv --out plan.toml` writes one, and each run folder has its own as "
        "`recipe.toml`. On the command line, `--set data.batch=16` changes a key. `[techniques]` has one table per "
        'technique, such as `[techniques."adapters.lora"]`, with the settings of its page.',
    ]
    top = [each for each in settings_of(recipe.Recipe) if each["type"] in ("str", "int", "bool")]
    parts += ["## Top level", settings_table(top, attribute_texts(recipe.Recipe))]
    for section, kind in RECIPE_TABLES.items():
        texts = attribute_texts(kind)
        parts += [f"## [{section}]", md(" ".join((kind.__doc__ or "").split()))]
        parts.append(settings_table(settings_of(kind), texts))
    return join(*parts)
