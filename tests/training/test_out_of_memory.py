"""A run that is out of memory reports its phase, its peaks and a fix, and records its end in its folder."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_recipes
import torch
from tiny_runs import plain_run, technique, with_optimizer
from torch import Tensor, nn

from thrifty.checking.promise_check import check_run
from thrifty.core.out_of_memory import OutOfMemory, is_out_of_memory
from thrifty.core.recipe import Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.experiments.study_workers import _answer
from thrifty.optim.torch_optimizer import UpdateLocation
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.training.checkpoint_writer import CheckpointWriter
from thrifty.training.run_folder import RunFolder
from thrifty.training.trainer import resume, train


def refuse(*anything: object, **named: object) -> dict[str, float]:
    torch.empty(2**50, dtype=torch.uint8)
    return {}


class Short(nn.Module):
    """A model of tokens (b, t) whose allocator fails in one phase, if values are real, unless there is `room`."""

    room = False

    def __init__(self, phase: str = ""):
        super().__init__()
        self.phase = "" if self.room else phase
        self.embedding, self.out = nn.Embedding(300, 8), nn.Linear(8, 300)
        if self.phase == "building the model" and type(self.out.weight.data) is Tensor:
            refuse()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if type(x.data) is Tensor:
            if self.phase == ("the forward pass of step 1" if self.training else "the evaluation"):
                refuse()
            if self.phase == "the backward pass of step 1" and self.training:
                x.register_hook(refuse)
        return self.out(x)


def where_real(otherwise: Callable[..., None]) -> Callable[..., object]:
    def update(site: UpdateLocation, *given: Any) -> object:
        return (refuse if type(given[1][0].data) is Tensor else otherwise)(site, *given)

    return update


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "phase",
    [
        "building the model",
        "the forward pass of step 1",
        "the backward pass of step 1",
        "the update of step 1",
        "the evaluation",
        "saving a checkpoint",
    ],
)
def test_the_phase_is_named_and_the_summary_is_written(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "update" in phase:
        monkeypatch.setattr(UpdateLocation, "update", where_real(UpdateLocation.update))
    if "saving" in phase:
        monkeypatch.setattr(CheckpointWriter, "commit", refuse)
    recipe = tiny_recipes.text(tmp_path)
    says = rf"^out of memory in {phase}: 1,125,899,907 MB more were refused; the predicted peak is [\d,]+ MB, and"
    with pytest.raises(OutOfMemory, match=says) as error:
        train(replace(recipe, objects=UserObjects(model=partial(Short, phase))), tmp_path, quiet=True)
    folder = RunFolder(tmp_path / "text")
    summary = folder.read_json("summary")
    assert (summary["status"], summary["exit_code"], summary["error"]) == ("stopped", 3, str(error.value))
    monkeypatch.undo()
    monkeypatch.setattr(Short, "room", True)
    recipe = replace(recipe, objects=UserObjects(model=partial(Short, phase)))
    assert resume(folder.path, recipe, quiet=True)["status"] == "finished"


@pytest.mark.slow
def test_the_fix_adds_techniques_that_are_off(tmp_path: Path) -> None:
    recipe = RecipeLayers.above("", tiny_recipes.text(tmp_path)).add_technique("memory.recompute").recipe()
    folder = tmp_path / "its runs" / "text"
    fix = _fix_of(recipe, folder)
    plan, start = (shlex.split(command) for command in re.findall("`(.*?)`", fix))
    assert plan[:3] == ["thrifty", "plan", f"{folder}/recipe.toml"] and plan[3] == "--memory"
    assert start[:5] == ["thrifty", "train", f"{folder}/recipe.toml", "--name", "text-lean"]
    words = re.findall(r"--with (\S+?)[,`]", fix)
    assert "large_batch.gradient_accumulation:micro_batches=2" in words and "memory.offload_optimizer" in words
    assert "memory.recompute" not in words and "large_batch.gradient_cache:micro_batches=2" not in words
    for word in words:
        lean = RecipeLayers.above("", replace(recipe, name=word.replace(":", "-"))).add_technique(word).recipe()
        assert train(lean, tmp_path, quiet=True)["status"] == "finished"


def _fix_of(recipe: Recipe, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateLocation, "update", where_real(UpdateLocation.update))
        with pytest.raises(OutOfMemory) as error:
            train(recipe, folder.parent, quiet=True)
    return error.value.fix


def build() -> nn.Module:
    return Short("the forward pass of step 1")


def test_the_plan_command_names_an_importable_model(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as error:
        train(replace(tiny_recipes.text(tmp_path), objects=UserObjects(model=build)), tmp_path, quiet=True)
    assert f" --model {__name__}:build`" in error.value.fix
    with pytest.raises(OutOfMemory) as error:
        other = tiny_recipes.text(tmp_path, name="other")
        train(replace(other, objects=UserObjects(model=lambda: build())), tmp_path, quiet=True)
    assert "thrifty plan" not in error.value.fix and "--set data.batch=4" in error.value.fix


def test_an_error_of_a_model_is_recorded_too(tmp_path: Path) -> None:
    class Faulty(Short):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) if type(self.out.weight.data) is not Tensor else tokens.missing

    with pytest.raises(AttributeError):
        train(replace(tiny_recipes.text(tmp_path), objects=UserObjects(model=Faulty)), tmp_path, quiet=True)
    summary = RunFolder(tmp_path / "text").read_json("summary")
    assert summary["status"] == "stopped" and summary["error"].startswith("AttributeError: ")


def test_a_check_and_a_study_report_it_without_a_verdict() -> None:
    class Greedy(technique("gradients.clip").__class__):
        backward = refuse

    with pytest.raises(RuntimeError) as error:
        check_run(plain_run, with_optimizer([Greedy()]))
    assert is_out_of_memory(error.value)
    answer = _answer({"measure": f"{__name__}:refuse", "seed": 0, "settings": {}})
    assert re.match(r"OutOfMemory: out of memory: 1,125,899,907 MB more were refused; .*\n  fix: ", answer["error"])
