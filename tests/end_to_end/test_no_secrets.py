"""Secrets on the command line, in the recipe and in the environment appear in no file of a run.

This includes its report, its exports and recipes written from it.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from planted_secrets import BODY, HEX, NAMED, PLANTED, SECRETS, WORD
from tiny_recipes import text

from thrifty.core.errors import UsageError
from thrifty.core.recipe import Recipe
from thrifty.models import export_model
from thrifty.models.model_resolution import model_shape
from thrifty.recipes.recipe_toml import read_recipe, write_recipe
from thrifty.reporting.run_page import write_page
from thrifty.reporting.run_record import read_run
from thrifty.trackers.record_follower import track
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import resume, train

ALL = [*PLANTED.values(), *NAMED]


def test_no_file_of_a_run_contains_a_planted_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["thrifty", "train", *ALL, *(f"--set=about={secret}" for secret in ALL)])
    for number, secret in enumerate(ALL):
        monkeypatch.setenv(f"PLANTED_{number}", secret)
    recipe = replace(text(tmp_path), about=" | ".join(ALL))
    origins = {"about": f"--set about={recipe.about}"}
    summary = train(recipe, tmp_path / "runs", origins=origins, quiet=True)
    run = Path(summary["folder"])
    forked = resume(run, replace(recipe, budget=replace(recipe.budget, steps=12)), fork="forked", quiet=True)
    write_page(read_run(run))
    track(run, "tensorboard", tmp_path / "tracked")
    model, stored = load_trained_model(run)
    export_model(model, model_shape(stored.model, 300, 16), tmp_path / "exported", run / "tokenizer.json")
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != tmp_path / "text.txt"]
    assert {"recipe.toml", "environment.json", "state.json", "report.html", "config.json"} <= {
        file.name for file in files
    }
    for file in files:
        content = file.read_bytes().decode("utf-8", "replace").replace("\\n", "\n")
        leaked = [secret for secret in (BODY, HEX, WORD, *SECRETS.values()) if secret in content]
        assert not leaked, file
    assert "[redacted]" in stored.about and forked["status"] == "finished"


def read_back(folder: Path, recipe: Recipe) -> Recipe:
    (folder / "recipe.toml").write_text(write_recipe(recipe))
    return read_recipe(folder / "recipe.toml")


def test_a_written_recipe_keeps_paths_and_no_passwords(tmp_path: Path) -> None:
    folder = tmp_path / f"hf_{BODY}"
    folder.mkdir()
    assert read_back(tmp_path, text(folder)) == text(folder)
    plain = text(tmp_path)
    address = replace(plain, data=replace(plain.data, source=f"https://anna:{WORD}@example.org/x.txt"))
    assert read_back(tmp_path, address).data.source == "https://anna:[redacted]@example.org/x.txt"


def test_a_name_that_looks_like_a_key_is_refused() -> None:
    with pytest.raises(UsageError, match="looks like a key") as refusal:
        Recipe(name=f"hf_{BODY}")
    assert BODY not in str(refusal.value)
