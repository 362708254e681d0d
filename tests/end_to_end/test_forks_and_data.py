"""What a run is tied to: its data, its tokenizer, its model; and what a fork may change."""

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
    """A run of `steps` that looks as if it had been killed after the checkpoint of step `at`."""
    thrifty.train(name, *words, steps=steps, checkpoints__every=at, checkpoints__keep=9, **changed)
    for path in (thrifty.run(name) / "checkpoints").glob("step-*"):
        if int(path.name[5:13]) > at:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


def test_a_run_is_not_resumed_on_other_data(thrifty: CommandLine) -> None:
    mine = thrifty.folder / "mine.txt"
    text = "\n\n".join(path.read_text() for path in sorted((thrifty.folder / "corpus").iterdir()))
    mine.write_text(text)
    cut_off(thrifty, "run", "--data", str(mine))
    tokenizer = (thrifty.run("run") / "tokenizer.json").read_bytes()
    mine.write_text(text[: len(text) // 2] + "something else altogether " * 50 + text[len(text) // 2 :])
    refused = thrifty("resume", "run", exit_code=4)
    assert "is not what this run was trained on" in refused.stderr
    assert (thrifty.run("run") / "tokenizer.json").read_bytes() == tokenizer


def test_a_pipe_in_the_place_of_a_tokenizer_is_refused_and_the_file_is_written_again(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    tokenizer = thrifty.run("run") / "tokenizer.json"
    content = tokenizer.read_bytes()
    tokenizer.unlink()
    os.mkfifo(tokenizer)  # to write into it would be to wait for a reader
    refused = thrifty("resume", "run", exit_code=2).stderr
    assert "tokenizer.json is a pipe or a device" in refused and f"rm {tokenizer}" in refused
    tokenizer.unlink()
    thrifty("resume", "run")
    assert tokenizer.is_file() and tokenizer.read_bytes() == content


@pytest.mark.slow
def test_a_fork_with_another_tokenizer_is_refused_with_the_way_out(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    refused = thrifty("resume", "run", "--fork", "other", "--set", "data.vocabulary=400", exit_code=2)
    assert "another tokenizer than the old run" in refused.stderr and "data.tokenizer=" in refused.stderr


@pytest.mark.slow
def test_a_fork_with_a_longer_budget_keeps_the_depth_that_stacking_had(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run", "--with", "growth.stacking:at=[0.25,0.75]", model__depth=4)
    forked = ("resume", "run", "--fork", "longer", "--set", "budget.steps=24", "--json")
    assert json.loads(thrifty(*forked).stdout)["steps"] == 24
    changes = [r for r in thrifty.run("longer").joinpath("records.jsonl").read_text().splitlines() if '"change"' in r]
    assert [json.loads(line)["step"] for line in changes] == [6, 18]


def test_what_would_take_away_what_was_learned_is_no_fork_and_no_fine_tuning(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    zeroed = ("--with", "initializations.rezero")
    refused = thrifty("resume", "run", "--fork", "zeroed", *zeroed, exit_code=2).stderr
    assert "initializations.rezero is not for trained weights" in refused and "--without" in refused
    thrifty("export", "run", "start")
    for verb in ("explain", "train"):
        refused = thrifty(verb, "text", "--data", "corpus", "--model", "start", *zeroed, exit_code=2)
        assert "is not for trained weights" in refused.stderr


@pytest.mark.slow
def test_a_fork_whose_technique_cannot_keep_its_promise_says_so(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    refused = thrifty("resume", "run", "--fork", "scored", "--with", "sparsity.snip", exit_code=2)
    assert "the old state breaks a promise of the changed recipe" in refused.stderr


@pytest.mark.slow
def test_a_dense_run_is_forked_into_a_sparse_one_whose_masks_are_chosen_by_its_weights(thrifty: CommandLine) -> None:
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
def test_a_time_budget_can_be_prolonged_by_a_fork(thrifty: CommandLine) -> None:
    cut_off(thrifty, "run")
    answer = json.loads(thrifty("resume", "run", "--fork", "timed", "--set", "budget.seconds=6", "--json").stdout)
    assert answer["steps"] > 4


def test_the_best_checkpoint_is_the_best_of_those_saved(thrifty: CommandLine) -> None:
    thrifty.train("run", steps=9, checkpoints__every=3, checkpoints__keep=9, evaluation__every=1)
    records = [json.loads(line) for line in (thrifty.run("run") / "records.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["loss"] for r in records if r["kind"] == "evaluation" and r["step"] % 3 == 0}
    best = (thrifty.run("run") / "checkpoints" / "BEST").read_text()
    assert f"{min(losses, key=lambda step: losses[step]):08d}" in best


def test_a_model_of_ones_own_is_never_restored_as_another(tmp_path: Path, thrifty: CommandLine) -> None:
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
    with pytest.raises(UsageError, match=r"has model from Python .*build"):
        load_trained_model(tmp_path / "own")
    with pytest.raises(UsageError, match=r"own trained .*build, not .*lambda"):
        load_trained_model(tmp_path / "own", objects=UserObjects(lambda: torch.nn.Linear(2, 2)))
