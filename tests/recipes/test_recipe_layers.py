"""Recipes composed from options of the command line, and the origin of each value."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thrifty.cli.recipe_options import announce, build_recipe
from thrifty.composition.compose import refuse_illegal
from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.plain_values import read_budget
from thrifty.core.recipe import Budget, Recipe
from thrifty.recipes.language_recipes import kjv
from thrifty.recipes.recipe_layers import RecipeLayers, toml_value
from thrifty.recipes.vision_recipes import vit_cifar10
from thrifty.techniques.adapters.lora import Lora
from thrifty.techniques.growth.stacking import ProgressiveStacking
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.optimizers.lamb import Lamb


def test_later_layers_win_and_origins_are_recorded() -> None:
    layers = build_recipe(
        "kjv", data="mine.txt", budget="10min", seed=3, name="test", assignments=("data.batch=8", "seed=4")
    )
    recipe = layers.recipe()
    assert (recipe.data.source, recipe.data.batch, recipe.seed, recipe.name) == ("mine.txt", 8, 4, "test")
    assert (recipe.budget.seconds, recipe.budget.steps) == (600.0, None)
    origins = layers.changed()
    assert origins["data.source"] == "--data"
    assert origins["data.batch"] == origins["seed"] == "--set"
    assert origins["budget.seconds"] == "--budget" and "budget.steps" not in origins
    assert origins["model.preset"] == "recipe kjv"
    assert origins["techniques.optimizers.adamw.lr"] == "recipe kjv"
    defaults = ("data.length", "techniques.optimizers.adamw.eps")  # set by no layer
    assert not any(path in origins for path in defaults)


def test_unchanged_values_equal_the_recipe() -> None:
    below = kjv()
    layers = RecipeLayers.above("recipe kjv", below).set("data.batch=8").add_technique("optimizers.adamw:lr=1e-3")
    recipe = layers.recipe()
    assert (recipe.model, recipe.budget) == (below.model, below.budget)
    assert recipe.model is below.model and recipe.budget is below.budget
    changed = [one for one in recipe.techniques if not any(one is other for other in below.techniques)]
    assert [one.name for one in changed] == ["optimizers.adamw"]
    assert replace(recipe.data, batch=below.data.batch) == below.data


def test_augmentation_is_changed_value_by_value() -> None:
    below = vit_cifar10()
    assert below.data.augment is not None and below.data.augment.magnitude != 0.5
    layers = RecipeLayers.above("recipe", below).set("data.augment.magnitude=0.5")
    assert layers.recipe().data.augment == replace(below.data.augment, magnitude=0.5)
    assert layers.changed()["data.augment.crop"] == "recipe"
    assert layers.changed()["data.augment.magnitude"] == "--set"


def test_model_takes_a_preset_or_a_folder(tmp_path: object) -> None:
    assert build_recipe("text", model="gpt-nano").recipe().model.preset == "gpt-nano"
    assert build_recipe("text", model=str(tmp_path)).recipe().model.folder == str(tmp_path)


def test_model_folder_brings_its_tokenizer_unless_one_is_set(tmp_path: Path) -> None:
    assert build_recipe("text", model=str(tmp_path)).recipe().data.tokenizer == ""
    (tmp_path / "tokenizer.json").write_text("{}")
    layers = build_recipe("text", model=str(tmp_path))
    assert layers.recipe().data.tokenizer == str(tmp_path / "tokenizer.json")
    assert layers.changed()["data.tokenizer"] == "--model"
    own = build_recipe("text", model=str(tmp_path), assignments=("data.tokenizer=own.json",))
    assert own.recipe().data.tokenizer == "own.json"


def test_mesh_adds_the_techniques_of_its_axes() -> None:
    layers = RecipeLayers().add_technique("parallelism.shard").apply_mesh("replicate=2,shard=4,pipeline=1")
    recipe = layers.recipe()
    assert (recipe.mesh.replicate, recipe.mesh.shard, recipe.mesh.tensor) == (2, 4, 1)
    assert [technique.name for technique in recipe.techniques] == ["parallelism.shard"]
    brought = RecipeLayers().apply_mesh("replicate=2").recipe()
    assert [technique.name for technique in brought.techniques] == ["parallelism.replicate"]
    with pytest.raises(UsageError, match=r"unknown key 'mesh\.tensr'") as refused:
        RecipeLayers().apply_mesh("tensr=2").recipe()
    assert "tensor" in refused.value.fix


@pytest.mark.parametrize(
    ("words", "technique"),
    [
        ("adapters.lora", Lora()),
        ("adapters.lora:rank=4,alpha=8", Lora(rank=4, alpha=8.0)),
        ("adapters.lora:rank_stabilized=true,dropout=0.1", Lora(rank_stabilized=True, dropout=0.1)),
        ("adapters.lora:rank_stabilized=false", Lora(rank_stabilized=False)),
        ("adapters.lora:where=mlp", Lora(where="mlp")),
        ("adapters.lora:where=truely", Lora(where="truely")),
        ('adapters.lora:where="attention|mlp"', Lora(where="attention|mlp")),
        ('adapters.lora:where="a=b, c",rank=2', Lora(where="a=b, c", rank=2)),
        ("adapters.lora:alpha=-1.5e-3", Lora(alpha=-1.5e-3)),
        ("optimizers.lamb:norm_bounds=[0.5,inf]", Lamb(norm_bounds=(0.5, math.inf))),
        ("growth.stacking:at=[10,0.5],moments=copy", ProgressiveStacking(at=(10, 0.5), moments="copy")),
        ("growth.stacking: at = [] , moments = copy", ProgressiveStacking(at=(), moments="copy")),
        ("optimizers.adamw:betas=[0.8,0.9],lr=1e-3", AdamW(betas=(0.8, 0.9), lr=1e-3)),
    ],
)
def test_with_takes_a_name_and_settings(words: str, technique: object) -> None:
    layers = RecipeLayers().add_technique(words)
    assert layers.recipe().techniques == (technique,)
    assert set(layers.origins.values()) <= {"--with"}


@pytest.mark.parametrize("settings", ["rank", "rank=", "rank=4;alpha=3", "]"])
def test_unreadable_with_is_refused_with_its_form(settings: str) -> None:
    with pytest.raises(UsageError, match="is not name:key=value") as error:
        RecipeLayers().add_technique(f"adapters.lora:{settings}")
    assert "--with optimizers.adamw:lr=1e-3" in error.value.fix


def test_unknown_technique_or_setting_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no technique 'adapters\.lorra'") as error:
        RecipeLayers().add_technique("adapters.lorra")
    assert "adapters.lora" in error.value.fix
    with pytest.raises(UsageError, match=r"techniques\.adapters\.lora\.rnak") as error:
        RecipeLayers().add_technique("adapters.lora:rnak=3").recipe()
    assert "rank" in error.value.fix


def test_with_changes_only_named_settings() -> None:
    layers = build_recipe("text", additions=("optimizers.adamw:weight_decay=0.3",))
    adamw = next(t for t in layers.recipe().techniques if isinstance(t, AdamW))
    assert (adamw.weight_decay, adamw.lr) == (0.3, 2e-3)
    assert layers.changed()["techniques.optimizers.adamw.weight_decay"] == "--with"
    assert layers.changed()["techniques.optimizers.adamw.lr"] == "recipe text"


def test_an_added_technique_replaces_that_of_the_recipe() -> None:
    for words, removed in {
        "muon:lr=3e-3": {"optimizers.adamw": "optimizers.muon"},
        "schedule_free": {
            "optimizers.adamw": "optimizers.schedule_free",
            "schedules.linear": "optimizers.schedule_free",
        },
        "ema": {},
    }.items():
        layers = build_recipe("text", additions=(words,))
        assert layers.replaced == removed
        before, after = ([t.name for t in each.recipe().techniques] for each in (build_recipe("text"), layers))
        assert {*before} - {*after} == {*removed}
        assert not any(path.startswith(tuple(f"techniques.{name}" for name in removed)) for path in layers.values())


def test_two_added_optimizers_are_refused() -> None:
    recipe = build_recipe("text", additions=("muon", "lion")).recipe()
    assert {"optimizers.muon", "optimizers.lion"} == {t.name for t in recipe.techniques if Claim.OPTIMIZER in t.claims}
    with pytest.raises(UsageError, match="both decide the optimizer"):
        refuse_illegal(recipe.techniques)


def test_without_removes_a_technique_and_its_origins() -> None:
    layers = build_recipe("text", removals=("gradients.clip",))
    assert "gradients.clip" not in [t.name for t in layers.recipe().techniques]
    assert not any("clip" in path for path in layers.changed())
    swapped = build_recipe("text", removals=("optimizers.adamw",), additions=("optimizers.lion",))
    names = [t.name for t in swapped.recipe().techniques]
    assert "optimizers.lion" in names and "optimizers.adamw" not in names
    with pytest.raises(UsageError, match="there is no technique") as error:
        build_recipe("text", removals=("gradients.clipp",))
    assert "gradients.clip" in error.value.fix
    with pytest.raises(UsageError, match="the recipe does not use it"):
        build_recipe("text", removals=("lora",))


@pytest.mark.parametrize(
    ("assignment", "path", "value"),
    [
        ("data.batch=16", "data.batch", 16),
        ("data.source=my file.txt", "data.source", "my file.txt"),
        ("data.source=", "data.source", ""),
        ("data.source=a=b", "data.source", "a=b"),
        ("model.tied=true", "model.tied", True),
        ("data.held_out=1e-1", "data.held_out", 0.1),
        ("techniques.optimizers.adamw.lr=5e-4", "techniques.optimizers.adamw.lr", 5e-4),
        ("techniques.optimizers.adamw.betas=[0.5, 0.6]", "techniques.optimizers.adamw.betas", [0.5, 0.6]),
        ('name="quoted"', "name", "quoted"),
    ],
)
def test_set_changes_any_value_by_its_path(assignment: str, path: str, value: object) -> None:
    layers = build_recipe("text", assignments=(assignment,))
    assert layers.values()[path] == value
    assert layers.origins[path] == "--set"
    layers.recipe()


@pytest.mark.parametrize("assignment", ["data.batch", "=3", ""])
def test_incomplete_set_is_refused_with_its_form(assignment: str) -> None:
    with pytest.raises(UsageError, match="is not path=value"):
        RecipeLayers().set(assignment)


def test_set_of_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"data\.bacth") as error:
        build_recipe("text", assignments=("data.bacth=3",)).recipe()
    assert "batch" in error.value.fix
    with pytest.raises(UsageError, match="as a value and as a table"):
        build_recipe("text", assignments=("seed.x=3",)).recipe()


def test_new_budget_replaces_the_old_and_two_are_refused(tmp_path: Path) -> None:
    assert build_recipe("text", assignments=("budget.seconds=3",)).recipe().budget == Budget(seconds=3)
    both = tmp_path / "both.toml"
    both.write_text("[budget]\nsteps = 3\nseconds = 3\n")
    with pytest.raises(UsageError, match="both set"):
        build_recipe(str(both)).recipe()


def test_value_is_toml_or_text() -> None:
    assert toml_value("[1, 2]") == [1, 2]
    assert toml_value("true") is True and toml_value("True") == "True"
    assert toml_value("1 2") == "1 2"


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("500steps", {"steps": 500}),
        ("1 step", {"steps": 1}),
        ("2e3 steps", {"steps": 2000}),
        ("1e7tokens", {"tokens": 1e7}),
        ("1.5e6 Tokens", {"tokens": 1.5e6}),
        ("10_000 tokens", {"tokens": 10_000.0}),
        ("3epochs", {"epochs": 3.0}),
        ("0.5 epoch", {"epochs": 0.5}),
        ("90s", {"seconds": 90.0}),
        ("90 sec", {"seconds": 90.0}),
        ("10min", {"seconds": 600.0}),
        ("1.5h", {"seconds": 5400.0}),
    ],
)
def test_budget_is_an_amount_with_its_unit(text: str, budget: dict[str, float]) -> None:
    assert read_budget(text) == budget
    assert build_recipe("text", budget=text).changes["budget"] == budget


@pytest.mark.parametrize("text", ["", "500", "steps", "-3steps", "3 parsecs", "1e-3 s", "ten steps", "5 steps 3"])
def test_invalid_amount_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="is not an amount") as error:
        read_budget(text)
    assert "500steps, 1e7tokens, 3epochs, 90s, 10min or 2h" in error.value.fix


def find_one(recipe: Recipe, name: str) -> Any:
    return next(technique for technique in recipe.techniques if technique.name == name)


def test_short_options_set_values_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    short = {"batch": 4, "length": 64, "steps": 7, "device": "cpu", "epochs": None}
    recipe = announce(build_recipe("text", lr=0.5, **short)).recipe()
    assert (recipe.data.batch, recipe.data.length, recipe.budget, recipe.device) == (4, 64, Budget(steps=7), "cpu")
    assert find_one(recipe, "optimizers.adamw").lr == 0.5
    printed = capsys.readouterr().err.splitlines()
    assert "--lr sets techniques.optimizers.adamw.lr = 0.5" in printed and "--steps sets budget.steps = 7" in printed
    assert len(printed) == 5
    announce(build_recipe("text", lr=0.5), quiet=True)
    assert capsys.readouterr().err == ""


def test_learning_rate_is_of_the_chosen_optimizer() -> None:
    lion = build_recipe("text", removals=("optimizers.adamw",), additions=("optimizers.lion",), lr=0.25).recipe()
    assert find_one(lion, "optimizers.lion").lr == 0.25
    typed_last = build_recipe("text", lr=0.5, assignments=("techniques.optimizers.adamw.lr=0.125",)).recipe()
    assert find_one(typed_last, "optimizers.adamw").lr == 0.125
    with pytest.raises(UsageError, match="--lr: the recipe has 0 optimizers"):
        build_recipe("text", removals=("optimizers.adamw",), lr=0.5)


@pytest.mark.parametrize("two", [{"steps": 7, "epochs": 2.0}, {"budget": "10min", "steps": 7}])
def test_two_lengths_of_training_are_refused(two: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"both set the length of training\n.*keep only "):
        build_recipe("text", **two)
