"""Recipes with extreme values, which are refused with the path, the reason and a fix."""

import dataclasses
import math

import pytest

from thrifty import techniques
from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings, ModelSettings, Recipe
from thrifty.core.setting_bounds import hints_of
from thrifty.data.tokenizer import train_tokenizer
from thrifty.models.model_presets import shape_of
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import read_recipe, read_tables


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("seed = 1" + "0" * 5000, "4300 digits"),
        ("seed = 1" + "0" * 400, "seed has 1329 bits"),
        ("seed = 0x" + "f" * 9000, "seed has 36000 bits"),
        ("[data]\nlength = 1" + "0" * 30, r"data\.length has 10\d bits"),
        ("a = " + "[" * 100_000, "nested deeper than|not TOML"),
        ("a = " + "[" * 50 + "]" * 50, "nested deeper than 16 levels"),
        ("a" + ".a" * 90 + " = 1", "nested deeper than 16 levels"),
        ("a" + ".a" * 100_000 + " = 1", "nested deeper than 16 levels"),
        ('about = "a\\u0000b"', "about has the character '\\\\x00'"),
        ('[data]\nsource = "a\\u001b[2Jb"', r"data\.source has the character '\\x1b'"),
        ("[techniques.optimizers.adamw]\nlr = inf", r"optimizers\.adamw: lr is inf"),
        ("[techniques.optimizers.adamw]\nbetas = [nan, 0.9]", r"optimizers\.adamw: betas is|is nan"),
    ],
)
def test_impossible_value_in_a_recipe_is_refused(tmp_path, text, what):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=what) as refused:
        read_recipe(path)
    assert refused.value.fix and len(str(refused.value)) < 500
    with pytest.raises(UsageError, match=what):
        RecipeLayers().override(str(path), read_tables(path)).recipe()


@pytest.mark.parametrize(
    "assignment",
    [
        "seed=1" + "0" * 400,
        "seed=1" + "0" * 5000,
        "data.source=a\0b",
        "data.source=\udcff.txt",
        "about=" + "[" * 100_000,
        "a" * 10 + ".a" * 100_000 + "=1",
        "data.batch=" + "[" * 20 + "]" * 20,
        "techniques.optimizers.adamw.lr=inf",
    ],
)
def test_extreme_setting_is_refused(assignment):
    with pytest.raises(UsageError):
        RecipeLayers.above("a recipe", Recipe()).set(assignment).recipe()


def test_technique_settings_are_finite_and_within_64_bits():
    admitted = []
    for name in techniques.names():
        kind = techniques.find(name)
        for field in dataclasses.fields(kind):
            hint = str(hints_of(kind)[field.name])
            for extreme in (math.inf, math.nan) if "float" in hint else (10**400,) if "int" in hint else ():
                try:
                    kind(**{field.name: extreme})
                    admitted.append((name, field.name, extreme))
                except UsageError:
                    pass
    assert admitted == [("optimizers.lamb", "norm_bounds", math.inf)]


@pytest.mark.parametrize("sizes", [{"depth": 10**6}, {"width": 10**9}, {"hidden": 10**12}, {"heads": 10**9}])
def test_impossible_model_sizes_are_refused(sizes):
    with pytest.raises(UsageError, match=f"model: {next(iter(sizes))} is"):
        shape_of(ModelSettings(**sizes))


def test_vocabulary_beyond_memory_is_refused():
    with pytest.raises(UsageError, match=r"data\.vocabulary is 1000000000000.*\n.*4194304 or less"):
        train_tokenizer(["a"], 10**12)


def test_values_built_in_python_have_the_same_bounds():
    for make in (
        lambda: Recipe(seed=10**400),
        lambda: DataSettings(source="a\x07"),
        lambda: DataSettings(held_out=math.nan),
    ):
        with pytest.raises(UsageError):
            make()
