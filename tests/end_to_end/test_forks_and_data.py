"""Data, tokenizer and model are fixed for a run; a fork may change other settings."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import CommandLine

from thrifty.core.errors import UsageError
from thrifty.core.recipe import Budget, CheckpointSettings, DataSettings, ModelSettings, Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training import checkpoint
from thrifty.training.trained_model import load_trained_model
from thrifty.training.trainer import train


def cut_off(thrifty: CommandLine, name: str, *words: str, steps: int = 8, at: int = 4, **changed: object) -> None:
    """Make a run of `steps` that looks as if it had been killed after the checkpoint of step `at`."""
    thrifty.train(name, *words, steps=steps, checkpoints__every=at, checkpoints__keep=9, **changed)
    for path in (thrifty.run(name) / "checkpoints").glob("step-*"):
        if int(path.name[5:13]) > at:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


def test_a_run_does_not_resume_on_other_data(thrifty: CommandLine) -> None:
    mine = thrifty.folder / "mine.txt"
    text = "\n\n".join(path.read_text() for path in sorted((thrifty.folder / "corpus").iterdir()))
    mine.write_text(text)
    cut_off(thrifty, "run", "--data", str(mine))
    tokenizer = (thrifty.run("run") / "tokenizer.json").read_bytes()
    mine.write_text(text[: len(text) // 2] + "something else altogether " * 50 + text[len(text) // 2 :])
    refused = thrifty("resume", "run", exit_code=4)
    assert "is not what this run was trained on" in refused.stderr
    assert (thrifty.run("run") / "tokenizer.json").read_bytes() == tokenizer


def test_a_pipe_instead_of_a_tokenizer_is_refused(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    tokenizer = thrifty.run("run") / "tokenizer.json"
    content = tokenizer.read_bytes()
    tokenizer.unlink()
    os.mkfifo(tokenizer)  # a write to it would wait for a reader
    refused = thrifty("resume", "run", exit_code=2).stderr
    assert "tokenizer.json' is a pipe or a device" in refused and f"rm {tokenizer}" in refused
    tokenizer.unlink()
    thrifty("resume", "run")
    assert tokenizer.is_file() and tokenizer.read_bytes() == content


@pytest.mark.slow
def test_a_fork_with_another_tokenizer_is_refused(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    refused = thrifty("resume", "run", "--fork", "other", "--set", "data.vocabulary=400", exit_code=2)
    assert "another tokenizer than the old run" in refused.stderr and "data.tokenizer=" in refused.stderr


@pytest.mark.slow
def test_a_longer_fork_keeps_the_depth_of_stacking(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run", "--with", "growth.stacking:at=[0.25,0.75]", model__depth=4)
    forked = ("resume", "run", "--fork", "longer", "--set", "budget.steps=24", "--json")
    assert json.loads(thrifty(*forked).stdout)["steps"] == 24
    changes = [r for r in thrifty.run("longer").joinpath("records.jsonl").read_text().splitlines() if '"change"' in r]
    assert [json.loads(line)["step"] for line in changes] == [6, 18]


def test_forks_that_would_lose_trained_weights_are_refused(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    zeroed = ("--with", "initializations.rezero")
    refused = thrifty("resume", "run", "--fork", "zeroed", *zeroed, exit_code=2).stderr
    assert "initializations.rezero is not for trained weights" in refused and "--without" in refused
    thrifty("export", "run", "start")
    for verb in ("explain", "train"):
        refused = thrifty(verb, "text", "--data", "corpus", "--model", "start", *zeroed, exit_code=2)
        assert "is not for trained weights" in refused.stderr


@pytest.mark.slow
def test_a_fork_that_breaks_a_promise_is_refused(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    refused = thrifty("resume", "run", "--fork", "scored", "--with", "sparsity.snip", exit_code=2)
    assert "the old state breaks a promise of the changed recipe" in refused.stderr


@pytest.mark.slow
def test_a_dense_run_is_forked_into_a_sparse_one(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    sparse = "sparsity.static:criterion=magnitude,distribution=uniform,density=0.5"
    thrifty("resume", "run", "--fork", "sparse", "--with", sparse)
    old, new = (
        checkpoint.load(thrifty.run(name) / "checkpoints", step).tensors for name, step in (("run", 4), ("sparse", 8))
    )
    masks = {name.removeprefix("optimizer/masks.mask/"): m for name, m in new.items() if "masks.mask" in name}
    masks = {name: mask for name, mask in masks.items() if mask.numel()}
    for name, mask in masks.items():
        sizes = old[f"parameters/{name}"].abs()
        assert sizes[mask].min() >= sizes[~mask].max()
        assert not new[f"parameters/{name}"][~mask].any()
    assert masks


@pytest.mark.slow
def test_a_fork_can_extend_a_time_budget(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    answer = json.loads(thrifty("resume", "run", "--fork", "timed", "--set", "budget.seconds=6", "--json").stdout)
    assert answer["steps"] > 4


def test_best_is_the_best_of_the_saved_checkpoints(thrifty: CommandLine) -> None:
    thrifty.train("run", steps=9, checkpoints__every=3, checkpoints__keep=9, evaluation__every=1)
    records = [json.loads(line) for line in (thrifty.run("run") / "records.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "evaluation" and r["step"] % 3 == 0}
    best = (thrifty.run("run") / "checkpoints" / "BEST").read_text()
    assert f"{min(losses, key=lambda step: losses[step]):08d}" in best


def test_a_users_model_is_never_restored_as_another(tmp_path: Path, thrifty: CommandLine) -> None:
    recipe = Recipe(
        name="own",
        model=ModelSettings(preset="llama-nano"),
        data=DataSettings(source=str(thrifty.folder / "corpus"), vocabulary=300, length=32, batch=4),
        budget=Budget(steps=2),
        checkpoints=CheckpointSettings(every=2),
        techniques=(AdamW(),),
    )

    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Embedding(300, 16), torch.nn.Linear(16, 300))

    train(replace(recipe, objects=UserObjects(model=build)), tmp_path, quiet=True)
    with pytest.raises(UsageError, match=r"names Python objects .model: .*build"):
        load_trained_model(tmp_path / "own")
    with pytest.raises(UsageError, match=r"own.* trained .*build, not .*lambda"):
        load_trained_model(tmp_path / "own", objects=UserObjects(lambda: torch.nn.Linear(2, 2)))
