"""Recipes as TOML files: written, read, and refused with a reason."""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from thrifty import techniques
from thrifty.composition.compose import refuse_illegal
from thrifty.core.errors import UsageError
from thrifty.core.plain_values import differences
from thrifty.core.recipe import Budget, ModelSettings, Recipe
from thrifty.core.setting_bounds import SettingBound
from thrifty.core.technique import Technique
from thrifty.core.user_objects import PythonObjects, UserObjects
from thrifty.recipes import RECIPES, load_recipe
from thrifty.recipes.recipe_toml import read_recipe, recipe_from_data, recipe_to_data, write_recipe

TEXT = some.text(some.characters(exclude_categories=("Cs", "Cc")), max_size=12)


SOURCES = some.dictionaries(TEXT, some.integers(0, 2**48), max_size=3)
FIXED: dict[type, dict[str, some.SearchStrategy]] = {
    ModelSettings: {"build": some.none(), "arguments": some.none(), "weights": some.none()},
    PythonObjects: {"sources": SOURCES},
    Recipe: {"objects": some.just(UserObjects())},
}


def values_of(kind: Any) -> some.SearchStrategy:
    """Return a strategy of values of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        bound = next((note for note in arguments[1:] if isinstance(note, SettingBound)), None)
        return bounded(arguments[0], bound) if bound else values_of(arguments[0])
    if origin in (Union, types.UnionType):
        return some.one_of(*(values_of(option) for option in arguments))
    if origin is Literal:
        return some.sampled_from(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return some.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return some.tuples(*map(values_of, arguments))
    if origin is Mapping:
        return some.dictionaries(TEXT, values_of(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(kind):
        return BUDGETS if kind is Budget else any_of(kind)  # type: ignore[arg-type]
    return {
        int: some.integers(-(2**62), 2**62),
        float: some.floats(allow_nan=False, allow_infinity=False),
        bool: some.booleans(),
        str: TEXT,
        types.NoneType: some.none(),
    }[kind]


def _least(bound: SettingBound) -> int:
    """Return the least integer within a bound."""
    return int(bound.above) + 1 if bound.above is not None else int(bound.least or 0)


def bounded(kind: type, bound: SettingBound) -> some.SearchStrategy:
    if typing.get_origin(kind) is tuple:
        return some.tuples(*(bounded(part, bound) for part in typing.get_args(kind)))
    if typing.get_origin(kind) in (Union, types.UnionType):
        return some.one_of(
            *(values_of(part) if part is types.NoneType else bounded(part, bound) for part in typing.get_args(kind))
        )
    if kind is int:
        return some.integers(_least(bound), 2**62 if bound.most is None else int(bound.most))
    low = bound.above if bound.above is not None else bound.least
    high = bound.below if bound.below is not None else bound.most
    outside = {"exclude_min": bound.above is not None, "exclude_max": bound.below is not None}
    return some.floats(low, high, **outside, allow_nan=False, allow_infinity=False)


def any_of(kind: type, **fixed: some.SearchStrategy) -> some.SearchStrategy:
    hints = typing.get_type_hints(kind, include_extras=True)
    fixed = FIXED.get(kind, {}) | fixed
    others = {f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind) if f.name not in fixed}
    return some.builds(kind, **others, **fixed)


OWN_MODEL = some.builds(
    ModelSettings,
    build=TEXT,
    arguments=some.none()
    | some.dictionaries(TEXT, some.one_of(TEXT, some.booleans(), some.integers(-9, 9)), max_size=3),
    weights=some.sampled_from([None, "given"]),
)


def any_legal(kind: type[Technique]) -> some.SearchStrategy:
    """Return a strategy of settings that a technique accepts, alone and in combination."""

    def made(**settings: Any) -> Technique:
        technique = kind()
        for name, value in settings.items():
            with suppress(UsageError):
                technique = dataclasses.replace(technique, **{name: value})
        return technique

    hints = typing.get_type_hints(kind, include_extras=True)
    return some.builds(made, **{field.name: values_of(hints[field.name]) for field in dataclasses.fields(kind)})


BUDGETS = some.one_of(
    some.just(Budget()),
    some.builds(Budget, steps=some.integers(1, 10**9)),
    some.builds(Budget, tokens=some.floats(1, 1e15)),
    some.builds(Budget, seconds=some.floats(0.1, 1e9)),
)
TECHNIQUES: some.SearchStrategy[tuple[Technique, ...]] = some.lists(
    some.sampled_from(techniques.names()), unique=True, max_size=6
).flatmap(lambda names: some.tuples(*(any_legal(techniques.find(name)) for name in names)))
NAMES = some.from_regex(r"[A-Za-z0-9_é]([-A-Za-z0-9_.+=,@%()\[\]: é]{0,20}[a-z0-9])?", fullmatch=True)
ANY_RECIPE = any_of(Recipe, techniques=TECHNIQUES, name=NAMES, model=OWN_MODEL | any_of(ModelSettings))


@settings(max_examples=150)
@given(recipe=ANY_RECIPE)
def test_written_recipe_reads_back_as_an_equal_value(recipe: Recipe) -> None:
    again = recipe_from_data(tomllib.loads(write_recipe(recipe)))
    assert again == recipe
    assert write_recipe(again) == write_recipe(recipe)
    assert differences(recipe_to_data(recipe), recipe_to_data(again)) == []


@settings(max_examples=50)
@given(chosen=TECHNIQUES, order=some.randoms(use_true_random=False))
def test_order_of_techniques_does_not_matter(chosen: tuple[Technique, ...], order: Any) -> None:
    shuffled = list(chosen)
    order.shuffle(shuffled)
    assert Recipe(techniques=tuple(shuffled)) == Recipe(techniques=chosen)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_composed_written_and_read(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name]()
    assert recipe.name == name and recipe.about
    assert "Command" in (RECIPES[name].__doc__ or "")
    refuse_illegal(recipe.techniques)
    path = tmp_path / "recipe.toml"
    path.write_text(write_recipe(recipe), encoding="utf-8")
    assert read_recipe(path) == recipe
    from_file, from_name = load_recipe(str(path), "it"), load_recipe(name, "it")
    assert from_file.recipe() == from_name.recipe() == recipe
    assert (from_file.values(), from_file.changed()) == (from_name.values(), from_name.changed())
    assert write_recipe(from_name.recipe()) == path.read_text(encoding="utf-8") == write_recipe(from_file.recipe())


@pytest.mark.parametrize(
    ("toml", "key", "hint"),
    [
        ("sed = 1", "sed", "seed"),
        ("[model]\nwidht = 3", "model.widht", "width"),
        ("[modle]\nwidth = 3", "modle", "model"),
        ("[data]\nbach = 3", "data.bach", "batch"),
        ("[budget]\nstep = 3", "budget.step", "steps"),
        ("[techniques.optimizers.adamw]\nweight_deacy = 0.1", "optimizers.adamw.weight_deacy", "weight_decay"),
        ("[techniques.optimizers.adam]\nlr = 0.1", "optimizers.adam", "optimizers.adamw"),
        ("[techniques.optimisers.adamw]", "optimisers", "optimizers"),
        ("[techniques.compil]", "compil", "compile"),
    ],
)  # fmt: skip
def test_unknown_key_is_named_with_its_path_and_the_nearest(toml: str, key: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        recipe_from_data(tomllib.loads(toml))
    assert key in error.value.what
    assert hint in error.value.fix


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('seed = "1"', "seed must be a whole number, not '1'"),
        ("seed = 1.5", "seed must be a whole number, not 1.5"),
        ("seed = true", "seed must be a whole number, not True"),
        ("name = 3", "name must be text, not 3"),
        ("model = 3", "model must be a table, not 3"),
        ("[model]\nreinitialize = 1", "model.reinitialize must be true or false, not 1"),
        ('[model]\nwidth = "big"', "model.width must be a whole number, not 'big'"),
        ("[data]\nheld_out = true", "data.held_out must be a number, not True"),
        ("[techniques.optimizers.adamw]\nbetas = 0.9", "betas must be a list, not 0.9"),
        ("[techniques.optimizers.adamw]\nbetas = [0.9]", "betas must have 2 entries, not 1"),
        ('[techniques.optimizers.adamw]\nbetas = [0.9, "x"]', "betas[1] must be a number, not 'x'"),
        ("[techniques.growth.stacking]\nat = [0.1, false]", "at[1] must be a whole number or a number, not False"),
        ('[techniques.growth.stacking]\nmoments = "reste"', "moments is 'reste'"),
        ("[techniques]\ncompile = 3", "techniques.compile must be a table, not 3"),
        ("[techniques]\noptimizers = 3", "techniques.optimizers must be a table, not 3"),
        ("techniques = 3", "techniques must be a table, not 3"),
    ],
)
def test_value_of_the_wrong_type_is_refused(toml: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        recipe_from_data(tomllib.loads(toml))
    assert message in error.value.what


def test_whole_number_is_accepted_as_a_float() -> None:
    recipe = recipe_from_data(tomllib.loads("[techniques.gradients.clip]\nmax_norm = 2"))
    (clip,) = recipe.techniques
    assert repr(clip.max_norm) == "2.0"  # type: ignore[attr-defined]


def test_moments_distinguish_steps_and_fractions() -> None:
    technique = recipe_from_data(tomllib.loads("[techniques.growth.stacking]\nat = [1, 1.0]")).techniques[0]
    assert [type(moment) for moment in technique.at] == [int, float]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[budget]\nsteps = 3\nseconds = 4", "budget: steps and seconds are both set"),
        ("[budget]\nsteps = 0", "budget.steps is 0"),
        ("[budget]\ntokens = -1.0", "budget.tokens is -1.0"),
    ],
)
def test_budget_is_one_positive_amount(toml: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        recipe_from_data(tomllib.loads(toml))


def test_invalid_recipe_file_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no recipe 'kvj'") as error:
        load_recipe("kvj", "it")
    assert "'kjv'" in error.value.fix
    with pytest.raises(UsageError, match="there is no recipe file"):
        load_recipe("missing.toml", "it")
    for content in (b"name = ", b"\xff\xfe", b"[[a"):
        path = tmp_path / "bad.toml"
        path.write_bytes(content)
        with pytest.raises(UsageError, match="is not TOML"):
            load_recipe(str(path), "it")
    path.write_bytes(b"# " + b"x" * 1_000_000)
    with pytest.raises(UsageError, match="but a recipe has at most"):
        load_recipe(str(path), "it")
    with pytest.raises(UsageError, match="there is no recipe file"):
        load_recipe(str(tmp_path), "it")
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(UsageError, match=f"fix: pass {tmp_path}/recipe.toml"):
        load_recipe(str(tmp_path), "it")


def test_run_name_as_recipe_is_refused_with_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "recipe.toml").write_text("")
    with pytest.raises(UsageError, match=r"(?s)'mine' is a run.*pass runs/mine/recipe.toml"):
        load_recipe("mine", "it")


def test_differences_name_each_changed_value() -> None:
    old, new = (recipe_to_data(r) for r in (Recipe(), dataclasses.replace(RECIPES["kjv"](), name="run", about="")))
    lines = differences(old, new)
    assert "data.source: '' → 'kjv'" in lines
    assert any(line.startswith("techniques.optimizers: absent → present") for line in lines)
