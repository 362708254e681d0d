"""Recipes from the arguments of `train`, and the objects that they hold."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import user_work

import thrifty
from thrifty.cli.recipe_options import build_recipe
from thrifty.core.errors import TYPED, UsageError
from thrifty.core.user_objects import UserObjects
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import recipe_from_data, recipe_to_data, write_recipe


def own(**changed: Any) -> thrifty.Recipe:
    return thrifty.recipe(**{**user_work.objects(), "budget": 3, "batch": 16, "name": "own", **changed})


def test_a_recipe_trains_as_the_same_arguments_do(tmp_path: Path) -> None:
    one = thrifty.train(recipe=own(), runs=tmp_path / "recipe", quiet=True)
    other = thrifty.train(**user_work.objects(), budget=3, batch=16, name="own", runs=tmp_path, quiet=True)
    assert one.loss == other.loss and one.folder == tmp_path / "recipe" / "own"


def test_objects_are_in_the_value_and_in_no_file() -> None:
    recipe = own()
    assert recipe.objects.loss is user_work.loss and "objects" not in repr(recipe)
    assert "objects" not in recipe_to_data(recipe) and "NoisySums" in write_recipe(recipe)
    with pytest.raises(UsageError, match="unknown key 'objects'"):
        recipe_from_data({"objects": {}})


def test_a_recipe_read_back_refuses_until_its_objects_are_passed() -> None:
    stored = recipe_from_data(recipe_to_data(own()))
    assert stored == own()
    for names in ((), ("model",)):
        with pytest.raises(UsageError, match="user_work:build"):
            stored.refuse_missing_objects(*names)
    replace(stored, objects=own().objects).refuse_missing_objects()
    replace(stored, objects=UserObjects(user_work.build)).refuse_missing_objects("model")


def test_passed_arguments_override_the_recipe() -> None:
    changed = thrifty.recipe("gpt2-nano", "corpus.txt", loss="next_token", recipe=own(), seed=3)
    assert changed.objects == UserObjects(metrics=own().objects.metrics)
    changed.refuse_missing_objects()
    assert changed.python == changed.objects.described
    assert (changed.model.preset, changed.data.source, changed.seed, changed.name) == (
        "gpt2-nano",
        "corpus.txt",
        3,
        "own",
    )


def test_a_module_is_where_training_starts_and_is_left_as_it_was(tmp_path: Path) -> None:
    model = user_work.build()
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[operator, union-attr]
    run = thrifty.train(recipe=own(model=model), techniques=[thrifty.Sgd(lr=1e-9)], runs=tmp_path, quiet=True)
    assert float(run.model[0].weight.abs().max()) < 1e-6  # type: ignore[index]
    assert not model[0].weight.any()  # type: ignore[operator, union-attr]


def test_a_run_on_arrays_is_resumed_with_its_objects(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    data = {"data": values, "held_out": values, "loss": squares}
    stop = [lambda record: record.step < 2]
    run = thrifty.train(user_work.build_plain, **data, budget=4, batch=8, runs=tmp_path, quiet=True, observers=stop)
    assert run.summary["status"] == "interrupted"
    assert thrifty.resume(run.folder, model=user_work.build_plain, **data, quiet=True).summary["steps"] == 4


def squares(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean(1)


def test_a_function_name_builds_the_model_with_arguments() -> None:
    arguments = {"in_features": 6, "out_features": 2}
    named = own(model="torch.nn:Linear", model_arguments=arguments)
    assert named.model.build == "torch.nn:Linear" and named.model.arguments == arguments
    assert named.objects.build_model(named.model.arguments).weight.shape == (2, 6)  # type: ignore[union-attr]
    again = thrifty.recipe(recipe=named, model="torch.nn:Linear", model_arguments={"out_features": 3})
    assert again.model.arguments == {"in_features": 6, "out_features": 3}
    with pytest.raises(UsageError, match="no function builds the model"):
        thrifty.recipe("llama-nano", model_arguments={"width": 3})
    with pytest.raises(UsageError, match="builds the model"):
        replace(named, model=replace(named.model, depth=3))


def test_partial_arguments_are_part_of_the_fingerprint() -> None:
    def sources(loss: Any) -> Any:
        return own(loss=loss).python.sources

    half, whole = (sources(partial(scaled, factor=factor, name=("a", Path("b")))) for factor in (0.5, 1.0))
    assert half != whole and half == sources(partial(scaled, factor=0.5, name=("a", Path("b"))))
    assert any("factor=0.5, name=('a', 'b')" in name for name in half)
    unstable = sources(partial(scaled, factor=torch.ones(1)))
    assert any("factor=torch:Tensor, whose value is not followed" in name for name in unstable)


class WeightedLoss:
    def __call__(self, model: Any, batch: Any) -> Any:
        return user_work.loss(model, batch)


def scaled(model: Any, batch: Any, factor: Any, name: Any = None) -> Any:
    return factor * user_work.loss(model, batch)


@dataclass
class Sizes:
    """Fields without defaults are no attributes of the class."""

    factor: float


def sized(model: Any, batch: Any) -> Any:
    return Sizes(0.5).factor * user_work.loss(model, batch)


def test_a_class_that_a_function_uses_is_part_of_the_fingerprint() -> None:
    assert any(name.endswith(":Sizes") for name in own(loss=sized).python.sources)


def test_wrong_builder_arguments_are_refused_with_known_ones() -> None:
    with pytest.raises(UsageError, match="missing a required argument: 'width'") as error:
        UserObjects(lambda width, depth=2: None).build_model()
    assert "model_arguments={'width': …}" in error.value.fix and "(width, depth=2)" in error.value.what


def test_object_names_stay_and_secret_arguments_are_redacted() -> None:
    tables = {"model": {"build": "my.tokens:secret"}, "python": {"loss": "token=my:loss", "sources": {"a.token:b": 1}}}
    written = write_recipe(recipe_from_data(tables))
    assert all(name in written for name in ("my.tokens:secret", "token=my:loss", "a.token:b"))
    assert "hunter2" not in write_recipe(own(loss=partial(scaled, factor=1, name="password=hunter2")))


def test_commands_are_printed_only_for_objects_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TYPED, "1")

    def words(*names: str, **changed: Any) -> str:
        with pytest.raises(UsageError) as error:
            recipe_from_data(recipe_to_data(own(metrics={}, **changed))).refuse_missing_objects(*names)
        return error.value.fix

    named = dict.fromkeys(("data", "held_out"), "user_work:some_sums")
    assert words(**named).startswith(
        "if you trust the code, add --model user_work:build --data user_work:some_sums --held"
    )
    assert words("model") == "if you trust the code, add --model user_work:build"
    assert "--model" not in words(model=user_work.build(), **named)
    for data in (user_work.NoisySums(20), [1, 2]):
        fix = words(data=data, held_out=data)
        assert "--data package.module:my_data --held-out package.module:my_held_out" in fix
    assert "--data user_work:some_sums" in (fix := words(**named, loss=WeightedLoss()))
    assert "--loss package.module:my_loss" in fix
    monkeypatch.delenv(TYPED)
    assert words("model") == "if you trust the code, pass model=… in Python"
    assert own(**named).resume_line("runs/own") == (
        "thrifty.resume('runs/own', model=build, data=…, held_out=…, loss=loss, metrics=…)"
    )


@pytest.mark.parametrize("name", ["hub:imdb", "hub:owner/name"])
def test_a_set_of_the_hub_is_no_name_of_an_object(name: str) -> None:
    typed = build_recipe("text", data=name).recipe()
    assert typed.data.source == thrifty.recipe(data=name).data.source == name


def test_held_out_data_are_never_left_out_in_silence(tmp_path: Path) -> None:
    assert own(data="train.csv", held_out="test.csv").data.held_out_source == "test.csv"
    assert thrifty.recipe(held_out="test.csv").data.held_out_source == "test.csv"
    assert thrifty.recipe(held_out=[1, 2], recipe=own()).objects.held_out == [1, 2]
    for data, held_out in (([1], "test.csv"), ("train.csv", [1]), (None, [1]), ({"train.csv": 1}, [1])):
        with pytest.raises(UsageError, match=r"held_out is a (path|dataset), but data"):
            thrifty.recipe(data=data, held_out=held_out)
    with pytest.raises(UsageError, match="held_out is a path, but data is a dataset"):
        thrifty.recipe(held_out="test.csv", recipe=own())


def test_a_source_takes_the_place_of_a_mixture(tmp_path: Path) -> None:
    mixed = thrifty.recipe(data={"a.txt": 1.0, "b.txt": 2.0})
    file = tmp_path / "mixed.toml"
    file.write_text(write_recipe(mixed))
    for changed in (thrifty.recipe(data="c.txt", recipe=mixed), build_recipe(str(file), "c.txt").recipe()):
        assert changed.data.source == "c.txt" and not changed.data.sources
    assert not thrifty.recipe(data=[1], held_out=[2], recipe=mixed).data.sources
    kept = RecipeLayers.above("mixed", mixed).apply_objects("c.txt", None, None).recipe()
    assert kept.data == replace(mixed.data, source="c.txt", sources={})


def test_the_command_that_resumes_a_run_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TYPED, "1")
    assert shlex.split(thrifty.recipe(name="own").resume_line("my runs/own"))[-1] == "my runs/own"


def test_plans_print_techniques_as_options_with_settings() -> None:
    chosen = own(techniques=["adamw:lr=3e-3,betas=[0.9,0.99]", "large_batch.gradient_accumulation:micro_batches=2"])
    assert (
        chosen.techniques
        == own(
            techniques=[thrifty.AdamW(lr=3e-3, betas=(0.9, 0.99)), thrifty.GradientAccumulation(micro_batches=2)]
        ).techniques
    )
    with pytest.raises(UsageError, match="is not name:key=value"):
        own(techniques=["adamw:3e-3"])


def test_settings_are_values_of_the_recipe_by_their_paths() -> None:
    chosen = own(settings={"evaluation.examples": 9, "checkpoints": {"every": 5}, "data.batch": 8})
    assert (chosen.evaluation.examples, chosen.checkpoints.every, chosen.data.batch) == (9, 5, 8)
    assert chosen.objects.loss is user_work.loss
    assert own(settings={"budget.seconds": 3}).budget.steps is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"evaluation.example": 3}, "(?s)unknown key 'evaluation.example'.*did you mean 'examples'"),
        ({"evaluation.examples": "many"}, "evaluation.examples must be a whole number, not 'many'"),
        ({"python.loss": "os:system"}, "(?s)python.loss' is not possible: the value is a Python object.*loss=.package"),
        (
            {"model.build": "os:system"},
            "(?s)model.build' is not possible: the value is a Python object.*model=.package",
        ),
        ({3: 4}, "not a dict of values by dotted path"),
        ([1], "not a dict of values by dotted path"),
    ],
)
def test_settings_that_a_recipe_does_not_have_are_refused(settings: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        own(settings=settings)


@pytest.mark.parametrize("call", [thrifty.export, thrifty.summary, thrifty.report])
def test_an_object_of_another_kind_is_refused_in_words(call: Any, tmp_path: Path) -> None:
    more = (tmp_path / "out",) if call is thrifty.export else ()
    with pytest.raises(UsageError, match=r"is not a run|summary requires a model"):
        call(3, *more)


@pytest.mark.parametrize("verb", [thrifty.explain, thrifty.check, thrifty.plan, thrifty.compare])
def test_a_model_instead_of_a_recipe_is_refused_with_the_fix(verb: Any) -> None:
    with pytest.raises(UsageError, match="the recipe is a 'Linear'") as error:
        verb(torch.nn.Linear(2, 2), quiet=True)
    assert "model=…, data=…" in error.value.fix
