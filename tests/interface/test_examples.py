"""The example in the docstring of each public function runs."""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import user_models
from command_line import write_corpus

import thrifty
from thrifty.core.recipe import DataSettings, EvaluationSettings, ModelSettings, Recipe

ONLY_CALLS = {
    "board": "it serves until Ctrl-C",
    "compare": "it takes minutes",
    "fit_scaling_law": "it requires many runs",
    "datasets.get": "it fetches from a registry",
    "doctor": "it measures the machine",
    "estimate": "its own tests are dearer",
    "lottery": "it takes four runs",
    "plan": "it runs probes",
    "predict": "it requires a run on labelled texts",
    "retrieve": "it requires images with captions",
    "study": "it takes minutes",
}
"""Functions whose examples are checked by their calls alone, and why."""
DEAR = {"chat", "check", "explain", "export", "report", "resume", "sample", "trace", "track", "train"}
DEAR |= {"simulate.published_accelerators", "simulate.published_runs"}
SMALL = Recipe(
    name="mine",
    model=ModelSettings(depth=1, width=32, heads=2, hidden=32),
    data=DataSettings(source="corpus", vocabulary=320, length=16, batch=4),
    evaluation=EvaluationSettings(examples=4),
)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(thrifty):
        value = getattr(thrifty, name)
        if inspect.isfunction(value):
            yield name, value
        elif isinstance(value, ModuleType) and name != "optim":
            own = [each for each in vars(value).values() if inspect.isfunction(each)]
            own = [each for each in own if each.__module__ == value.__name__ and not each.__name__.startswith("_")]
            yield from ((f"{name}.{each.__name__}", each) for each in own)


FUNCTIONS = dict(public_functions())


def example(name: str) -> str:
    _, _, code = (inspect.getdoc(FUNCTIONS[name]) or "").partition("Example::\n")
    assert code.strip(), f"thrifty.{name} has no example"
    return textwrap.dedent(code)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_of_an_example_fit_the_signatures(name: str) -> None:
    for node in ast.walk(ast.parse(example(name))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("thrifty.") in FUNCTIONS:
            called = FUNCTIONS[ast.unparse(node.func).removeprefix("thrifty.")]
            words = [keyword.arg for keyword in node.keywords if keyword.arg]
            inspect.signature(called).bind(*node.args, **dict.fromkeys(words))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_annotate_arguments_and_results(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    kinds = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
    assert inspect.Signature.empty not in kinds and signature.return_annotation not in (Any, object)


def own_run() -> None:
    thrifty.train(**OWN, name="mine", budget=3, observers=[lambda record: record.step < 2], quiet=True)


def text_run() -> None:
    write_corpus(Path("corpus"))
    thrifty.train(recipe=SMALL, techniques=["adamw"], budget=2, quiet=True)


OWN = {name: value for name, value in user_models.label_work().items() if name != "metrics"}
PREPARED = {"resume": own_run} | dict.fromkeys(("chat", "export", "report", "sample", "track"), text_run)
"""Runs that examples need."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in DEAR else [])
        for name in FUNCTIONS
        if name not in ONLY_CALLS
    ],
)
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARED.get(name, lambda: None)()
    names: dict[str, Any] = {
        "Path": Path,
        "thrifty": thrifty,
        "torch": torch,
        "build_model": OWN["model"],
        "train_set": OWN["data"],
        "test_set": OWN["held_out"],
        "loss": OWN["loss"],
        "loader": torch.utils.data.DataLoader(OWN["data"], 4),
        "model": OWN["model"](),
        "batch": torch.utils.data.default_collate([OWN["data"][index] for index in range(4)]),
        "recipe": thrifty.recipe(**OWN, budget=2, name="example"),
    }
    exec(compile(example(name), f"thrifty.{name}", "exec"), names)  # noqa: S102
