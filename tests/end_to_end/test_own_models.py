"""A user's own models in every command: `--model package.module:function`."""

import shutil
from pathlib import Path

import own_gpt
import pytest
from command_line import CommandLine, write_corpus

import thrifty as th

GPT, ARGUMENT = ("--model", "own.gpt:build"), ("--model-arg", "width=16")
SIZES = {
    "data.vocabulary": 320, "data.length": 32, "data.batch": 8, "evaluation.examples": 8, "checkpoints.every": 2,
}  # fmt: skip
TEXT = ("text", "--data", "corpus", "--without", "compile", "--budget", "4steps")
TEXT += tuple(word for path, value in SIZES.items() for word in ("--set", f"{path}={value}"))


def own_folder(folder: Path, fresh: bool) -> CommandLine:
    """Return a working folder with a user's package."""
    (folder / "own").mkdir()
    (folder / "own" / "__init__.py").touch()
    shutil.copy(own_gpt.__file__, folder / "own" / "gpt.py")
    write_corpus(folder / "corpus")
    return CommandLine(folder, fresh=fresh)


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_records_the_function_and_requires_it_again(fresh: bool, tmp_path: Path) -> None:
    thrifty = own_folder(tmp_path, fresh)
    thrifty("train", *TEXT, *GPT, *ARGUMENT, "--name", "mine", "--quiet")
    recipe = (thrifty.run("mine") / "recipe.toml").read_text()
    assert 'build = "own.gpt:build"' in recipe and "width = 16" in recipe and '"own.gpt:NanoGPT"' in recipe
    kept = next(iter(thrifty.run("mine").glob("checkpoints/*/scalars.json")), None)
    for text in (recipe, kept.read_text() if kept else "", thrifty("report", "mine").stdout):
        assert "llama" not in text.lower()
    for words in (("export", "mine", "out"), ("sample", "mine", "--prompt", "a"), ("resume", "mine", "--fork", "more")):
        refused = thrifty(*words, exit_code=2)
        assert "--model own.gpt:build" in refused.stderr
    thrifty("export", "mine", "out", *GPT)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"README.md", "model.json", "model.safetensors"}
    assert thrifty.json("sample", "mine", "--prompt", "a", "--tokens", "3", *GPT)["text"]
    other = thrifty("export", "mine", "again", "--model", "own.gpt:build_classifier", exit_code=2)
    assert "trained own.gpt:build, not own.gpt:build_classifier" in other.stderr
    changed = thrifty("resume", "mine", *GPT, "--model-arg", "width=32", exit_code=2)
    assert "model.arguments.width: 16 → 32" in changed.stderr
    thrifty("resume", "mine", *GPT, "--fork", "more", "--set", "budget.steps=6", "--quiet")
    file = tmp_path / "own" / "gpt.py"
    file.write_text(file.read_text().replace("F.gelu", "F.relu"))
    changed = thrifty("resume", "more", *GPT, exit_code=2)
    assert "the source of own.gpt:Block has changed" in changed.stderr and "NanoGPT" not in changed.stderr


@pytest.mark.slow
def test_every_command_accepts_a_users_model(tmp_path: Path) -> None:
    thrifty = own_folder(tmp_path, fresh=True)
    explained = thrifty.json("explain", *TEXT, *GPT, *ARGUMENT)
    assert explained["parameters"] < 30_000 and not explained["refused"]
    assert not [each for each in thrifty.json("check", *TEXT, *GPT)["verdicts"] if each["outcome"] == "broken"]
    short = ("--probe-seconds", "0.2", "--probed-candidates", "1", "--out", "plan.toml")
    planned = thrifty("plan", *TEXT, *GPT, *short, timeout=600).stdout
    assert "start it with thrifty train --model own.gpt:build plan.toml" in planned
    thrifty("train", "plan.toml", *GPT, "--name", "planned", "--quiet")
    race = ("--variant", "wide: --set model.arguments.width=64", "--seeds", "1", "--rate-trials", "1")
    compared = thrifty.json("compare", *TEXT, *GPT, *race, "--equal-budget", "steps", timeout=600)
    assert compared["status"] == "finished"
    thrifty("train", *TEXT, *GPT, "--ranks", "2", "--name", "ranked", "--quiet")
    thrifty("export", "ranked", "exported", *GPT)


@pytest.mark.slow
def test_a_users_classifier_learns_labels_of_images(tmp_path: Path) -> None:
    thrifty = own_folder(tmp_path, fresh=True)
    words = (
        "vit-digits",
        "--model",
        "own.gpt:build_classifier",
        "--budget",
        "3steps",
        "--set",
        "evaluation.examples=16",
    )
    thrifty("train", *words, "--name", "digits", "--quiet")
    assert 'build = "own.gpt:build_classifier"' in (thrifty.run("digits") / "recipe.toml").read_text()
    thrifty("export", "digits", "out", "--model", "own.gpt:build_classifier")


def test_a_vocabulary_above_the_embedding_is_refused(tmp_path: Path) -> None:
    thrifty = own_folder(tmp_path, fresh=False)
    for verb in ("explain", "train"):
        refused = thrifty(verb, *TEXT, *GPT, "--model-arg", "vocabulary=319", exit_code=2)
        assert "the embedding 'wte' has 319 rows, and 'tokens' of the examples has the value 319" in refused.stderr
        assert "build it with at least 320" in refused.stderr


WORK = """
import torch
import torch.nn.functional as F
from torch import nn

train_set = [{"x": torch.randn(6), "y": torch.tensor(number % 2)} for number in range(32)]

def build(width: int = 6):
    return nn.Linear(width, 2)

def test_set():
    return train_set[:8]

def loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
"""
OBJECTS = ("--model", "work:build", "--data", "work:train_set", "--held-out", "work:test_set", "--loss", "work:loss")
PLAIN = ("text", "--without", "compile", "--budget", "4steps", "--set", "data.batch=8", "--set", "checkpoints.every=2")


def test_user_data_and_loss_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    thrifty = CommandLine(tmp_path)
    assert not thrifty.json("explain", *PLAIN, *OBJECTS)["refused"]
    assert thrifty.json("estimate", *OBJECTS[1:4], *OBJECTS[6:], "--batch", "8")["fits"]
    thrifty("train", *PLAIN, *OBJECTS, "--name", "mine", "--quiet")
    recipe = (thrifty.run("mine") / "recipe.toml").read_text()
    assert 'data = "work:train_set"' in recipe and '"work:loss"' in recipe and '"work:test_set"' in recipe
    assert not any(word in recipe for word in ("preset", "folder", "next_token", "\nsource ="))
    for words in (("resume", "mine"), ("train", str(thrifty.run("mine") / "recipe.toml"), "--name", "other")):
        assert " ".join(OBJECTS) in thrifty(*words, exit_code=2).stderr
    thrifty("resume", "mine", *OBJECTS, "--fork", "more", "--set", "budget.steps=6", "--quiet")
    (tmp_path / "work.py").write_text(WORK.replace("cross_entropy(", "cross_entropy(0.5 * "))
    assert "the source of work:loss has changed" in thrifty("resume", "more", *OBJECTS, exit_code=2).stderr


@pytest.mark.parametrize("technique", ["", "lion:lr=2e-4", "gradients.clip"])
def test_command_line_and_python_make_the_same_run(
    technique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work.py").write_text(WORK.replace("torch.randn(6)", "torch.full((6,), number / 32)"))
    thrifty = CommandLine(tmp_path)
    words = ("--with", technique) if technique else ()
    thrifty("train", *OBJECTS, *words, "--budget", "3steps", "--set", "data.batch=8", "--name", "typed", "--quiet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = {name.lstrip("-").replace("-", "_"): text for name, text in zip(OBJECTS[::2], OBJECTS[1::2], strict=True)}
    chosen = [technique] if technique else []
    th.train(**names, techniques=chosen, budget="3 steps", batch=8, name="called", quiet=True)
    ran = [(thrifty.run(name) / "recipe.toml").read_text().replace(name, "NAME") for name in ("typed", "called")]
    assert ran[0] == ran[1] and "compile" not in ran[0]
    losses = [[record["loss"] for record in thrifty.records(name)] for name in ("typed", "called")]
    assert losses[0] == losses[1] and losses[0]


def test_existing_paths_and_incomplete_user_data(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(WORK)
    thrifty = CommandLine(tmp_path)
    assert "requires held-out data" in thrifty("explain", *PLAIN, *OBJECTS[:4], *OBJECTS[6:], exit_code=2).stderr
    assert (
        "did you mean 'train_set'" in thrifty("explain", *PLAIN, *OBJECTS, "--data", "work:train", exit_code=2).stderr
    )
    write_corpus(tmp_path / "work:train_set")
    explained = thrifty.json("explain", *TEXT, "--data", "work:train_set")
    assert explained["data"]["vocabulary"] == 320


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("widht=16", "did you mean 'width'?"),
        ("width=[1,2]", "takes: (width: int = 32, depth: int = 2, vocabulary: int = 320, context: int = 32)"),
    ],
)
def test_a_wrong_builder_argument_names_the_right_ones(argument: str, words: str, tmp_path: Path) -> None:
    thrifty = own_folder(tmp_path, fresh=False)
    refused = thrifty("explain", *TEXT, *GPT, "--model-arg", argument, exit_code=2).stderr
    assert words in refused and "width: int = 32" in refused and argument.partition("=")[0] in refused


def test_separate_documents_require_a_model_with_segments(tmp_path: Path) -> None:
    thrifty = own_folder(tmp_path, fresh=False)
    refused = thrifty("explain", *TEXT, *GPT, "--set", "data.separate=true", exit_code=2).stderr
    assert "NanoGPT.forward(" in refused and "does not take document numbers" in refused
