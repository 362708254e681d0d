"""Image runs on the command line: train, resume, fork, explain, report, export."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from command_line import CommandLine, assert_equal
from image_files import write_folder

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.recipe import AugmentationSettings, Budget, ObjectiveSettings
from thrifty.data.images.image_data import open_images
from thrifty.recipes import RECIPES
from thrifty.training.data_opening import open_examples
from thrifty.training.run_setup import prepare_run
from thrifty.training.trained_model import load_trained_model

SMALL = {"model.width": 32, "model.heads": 4, "model.depth": 2, "data.batch": 16, "evaluation.examples": 100}
FEW = {"checkpoints.every": 3, "evaluation.every": 3}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    folder = tmp_path_factory.mktemp("images")
    return CommandLine(folder, {"THRIFTY_CACHE": str(folder / "cache")})


def restore_in(desk: CommandLine, name: str) -> Any:
    """Return the trained model of a run whose recipe has a path relative to the folder of its start."""
    here = Path.cwd()
    os.chdir(desk.folder)
    try:
        return load_trained_model(desk.run(name))[0]
    finally:
        os.chdir(here)


def words(name: str, *others: str, steps: int = 6, **changed: Any) -> list[str]:
    values = SMALL | FEW | {key.replace("__", "."): value for key, value in changed.items()}
    settings = [word for path, value in values.items() for word in ("--set", f"{path}={json.dumps(value)}")]
    return ["train", "vit-digits", "--name", name, "--budget", f"{steps}steps", *settings, *others]


AUGMENTED = {"data__augment__crop": 1, "data__augment__mixup": 0.5, "data__augment__operations": 1}


@pytest.fixture(scope="module")
def finished(desk: CommandLine) -> dict[str, Any]:
    """Return summary and output of a run on digits, shared by several tests."""
    done = desk(*words("digits", **AUGMENTED))
    summary = json.loads((desk.run("digits") / "summary.json").read_text())
    return summary | {"stdout": done.stdout, "stderr": done.stderr}


@pytest.mark.slow
def test_accuracy_is_shown_wherever_the_loss_is(desk: CommandLine, finished: dict[str, Any]) -> None:
    assert finished["unit"] == "images" and finished["tokens"] == 6 * 16
    assert 0 <= finished["held_out"]["accuracy"] <= 1 and finished["label_entropy"] == pytest.approx(2.307, abs=0.01)
    evaluations = desk.records("digits", "evaluation")
    assert [each["step"] for each in evaluations] == [3, 6]
    assert evaluations[-1]["accuracy"] == finished["held_out"]["accuracy"]
    desk("report", "digits")
    page = (desk.run("digits") / "report.html").read_text()
    for text in ("Held-out accuracy", "nats per image", "images/s, median", "label frequencies alone have"):
        assert text in page, text
    assert "Bits per byte" not in page
    assert "accuracy" in finished["stdout"]
    assert "images/s" in finished["stderr"] and "tokens/s" not in finished["stderr"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(desk: CommandLine, finished: dict[str, Any]) -> None:
    expected, evaluated = desk.tensors("digits"), desk.records("digits", "evaluation")
    shutil.copytree(desk.run("digits"), desk.run("stopped"))
    shutil.rmtree(desk.run("stopped") / "checkpoints" / "step-00000006")
    desk("resume", "stopped")
    assert_equal(desk.tensors("stopped"), expected)
    assert desk.records("stopped", "evaluation")[-1] == evaluated[-1]


def test_a_continued_run_normalizes_as_before(desk: CommandLine, finished: dict[str, Any]) -> None:
    stated = shutil.copytree(desk.run("digits"), desk.run("older")) / "images.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | {"mean": [0.5], "std": [0.25]}))
    desk("resume", "older", "--fork", "newer", "--set", "budget.steps=8")
    desk("resume", "older", "--budget", "+1steps")
    for name in ("older", "newer"):
        kept = json.loads((desk.run(name) / "images.json").read_text())
        assert (kept["mean"], kept["std"]) == ([0.5], [0.25])


def test_an_exported_model_predicts_the_same_in_transformers(desk: CommandLine, finished: dict[str, Any]) -> None:
    desk("export", "digits", "out")
    assert sorted(path.name for path in (desk.folder / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]
    model = transformers.AutoModelForImageClassification.from_pretrained(desk.folder / "out").eval()
    restored, recipe = load_trained_model(desk.run("digits"))
    batch = next(open_images(recipe.data, 0, None, print).held_out.batches(100, 100))
    with torch.no_grad():
        logits = model(batch["inputs"]).logits
        torch.testing.assert_close(logits, restored.logits(batch["inputs"]), rtol=1e-5, atol=1e-5)
    right = (logits.argmax(1) == batch["labels"]).float().mean()
    assert float(right) == pytest.approx(finished["held_out"]["accuracy"])
    assert model.config.id2label[7] == "7"


def test_an_image_run_does_not_generate_text(desk: CommandLine, finished: dict[str, Any]) -> None:
    refused = desk("sample", "digits", exit_code=2).stderr
    assert "a model trained for classification does not predict the next token" in refused
    longer = desk.json("resume", "digits", "--fork", "longer", "--set", "budget.steps=8")
    assert longer["steps"] == 8
    again = desk("resume", "digits", "--set", "data.batch=8", exit_code=2).stderr
    assert "data.batch: 16 → 8" in again


def test_explain_describes_images(desk: CommandLine) -> None:
    _, *rest = words("explained")
    name = rest.index("--name")
    output = desk("explain", *rest[:name], *rest[name:], "--with", "adapters.visual_prompt:tokens=2").stdout
    assert "1,300 training images of 8 x 8 x 1, 10 labels" in output and "2 prompts in 2 of 2 blocks" in output


def test_a_folder_of_images_has_the_models_image_size(desk: CommandLine) -> None:
    folder = write_folder(desk.folder / "shades", 24)
    (folder / "light" / "broken.png").write_bytes(b"no image")
    changed = {"model__patch": 8, "model__depth": 1, "data__held_out": 0.25, "data__source": str(folder)}
    done = desk(*words("shades", "--json", steps=40, **changed))
    summary = json.loads(done.stdout)
    assert "1 of 49 image files are left out: light/broken.png: it is not an image" in done.stderr
    assert summary["held_out"]["accuracy"] == 1.0
    kept = json.loads((desk.run("shades") / "images.json").read_text())
    assert kept["labels"] == ["dark", "light"] and kept["side"] == 32 and kept["channels"] == 3
    seen = desk("data", "look", folder, "--size", "16").stdout
    assert "images of 16 x 16 pixels" in seen and "light/broken.png" in seen
    refused = desk(*words("text", "--data", "digits", objective__name="next_token"), exit_code=2).stderr
    assert "'vit-nano' cannot learn next_token" in refused or "digits" in refused


@pytest.mark.slow
def test_a_trained_model_continues_at_another_image_size(desk: CommandLine, finished: dict[str, Any]) -> None:
    if not (desk.folder / "start").exists():
        desk("export", "digits", "start")
    values = {"data.size": 12, "data.batch": 16, "evaluation.examples": 100, "model.reinitialize": False}
    settings = [word for path, value in values.items() for word in ("--set", f"{path}={json.dumps(value)}")]
    recipe = desk.folder / "go-on.toml"
    recipe.write_text(
        'name = "go-on"\n[model]\nfolder = "start"\n[data]\nsource = "digits"\n[objective]\nname = "classification"\n'
        "[budget]\nsteps = 2\n[techniques.optimizers.adamw]\nlr = 1e-4\n"
    )
    assert desk.json("train", recipe, *settings)["steps"] == 2
    assert restore_in(desk, "go-on").embedding.position.shape == (1, 37, 32)


def test_a_budget_of_tokens_counts_each_image_once() -> None:
    recipe = replace(RECIPES["vit-digits"](), budget=Budget(tokens=130.0), device="cpu")
    assert prepare_run(recipe, quiet=True).run.steps == 2
    with pytest.raises(InfeasibleError, match="is less than one step of 64"):
        prepare_run(replace(recipe, budget=Budget(tokens=63.0)), quiet=True)


def test_settings_of_images_are_refused_without_images() -> None:
    recipe = RECIPES["vit-digits"]()
    settings = replace(recipe.data, source="python-stdlib", size=8)
    text = replace(recipe, objective=ObjectiveSettings("next_token"), data=settings)
    with pytest.raises(UsageError, match=r"data.size is only for images, but next_token learns from text"):
        open_examples(text)
    nowhere = replace(recipe, data=replace(recipe.data, source="nowhere", augment=AugmentationSettings(flip=True)))
    with pytest.raises(UsageError, match=r"data.augment is only for images, but 'nowhere' contains none"):
        open_examples(nowhere)
