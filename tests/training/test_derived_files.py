"""Derived files of a run folder are recreated if they are damaged."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_recipes
from checkpoint_worlds import replace_state

from thrifty.core.errors import IntegrityError
from thrifty.core.recipe import Budget, CheckpointSettings, Recipe
from thrifty.training.run_folder import RunFolder
from thrifty.training.trainer import resume, train


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("text")
    return tiny_recipes.text(folder, budget=Budget(steps=4), checkpoints=CheckpointSettings(every=2))


@pytest.fixture(scope="module")
def cut(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that ended after two of its four steps."""
    folder = tmp_path_factory.mktemp("runs")
    train(recipe, folder, quiet=True)
    shutil.rmtree(folder / recipe.name / "checkpoints" / "step-00000004")
    return folder / recipe.name


@pytest.mark.parametrize(
    "content", [b"[]", b'"text"', b'{"footprint": 3, "plain": null, "cpu": []}', b"\xff\xfe", b"[" * 100_000]
)
def test_derived_files_of_another_type_are_recreated(content: bytes, recipe: Recipe, cut: Path, tmp_path: Path) -> None:
    shutil.copytree(cut, tmp_path / "run")
    for name in (
        "explanation.json",
        "environment.json",
        "origins.json",
        "summary.json",
        "job.json",
        "checkpoints/BEST",
    ):
        (tmp_path / "run" / name).write_bytes(content)
    assert resume(tmp_path / "run", recipe, quiet=True)["status"] == "finished"
    folder = RunFolder(tmp_path / "run")
    assert folder.read_json("explanation")["footprint"]["memory"] > 0
    assert folder.read_json("environment")["command"] and isinstance(folder.read_json("origins"), dict)
    assert folder.read_json("summary")["steps"] == 4


def test_an_unchanged_tokenizer_is_not_rewritten(recipe: Recipe, cut: Path, tmp_path: Path) -> None:
    shutil.copytree(cut, tmp_path / "run")
    file = tmp_path / "run" / "tokenizer.json"
    whole, before = file.read_bytes(), file.stat().st_ino
    resume(tmp_path / "run", recipe, quiet=True)
    assert file.read_bytes() == whole and file.stat().st_ino == before
    for damage in (lambda: file.write_bytes(whole[:100]), file.unlink):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
        damage()
        resume(tmp_path / "run", recipe, quiet=True)
        assert file.read_bytes() == whole


def test_a_checkpoint_without_data_and_steps_is_refused(recipe: Recipe, cut: Path, tmp_path: Path) -> None:
    shutil.copytree(cut, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    state = json.dumps({**json.loads((saved / "state.json").read_text()), "steps": None, "data": []}).encode()
    replace_state(saved, state)
    with pytest.raises(IntegrityError, match="lacks the data and the steps of its run"):
        resume(tmp_path / "run", recipe, quiet=True)
