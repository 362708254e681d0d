"""`thrifty.sweep` with real runs, and runs that pause."""

from pathlib import Path
from typing import Any

import pytest
import torch
import user_work

import thrifty
from thrifty.core.errors import UsageError
from thrifty.training.checkpoint import load

OPTIONS: Any = {"techniques": ["adamw", "linear", "gradients.clip"], "batch": 16, "quiet": True}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder / "checkpoints").tensors


def equal(first: Path, second: Path) -> bool:
    mine, its = tensors(first), tensors(second)
    return mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


def test_a_paused_run_resumes_bit_identically(tmp_path: Path) -> None:
    own = {**user_work.objects(), **OPTIONS, "budget": 12, "runs": tmp_path}
    whole = thrifty.train(name="whole", **own)
    paused = thrifty.train(name="paused", settings={"checkpoints.pause_at": 0.25}, **own)
    assert paused.summary["status"] == "interrupted" and paused.exit_code == 0
    assert paused.summary["steps"] == paused.summary["evaluated_step"] == 3
    resumed = thrifty.resume(paused, quiet=True)
    assert resumed.summary["status"] == "finished" and equal(whole.folder, resumed.folder)


def test_the_best_trial_equals_training_with_its_settings(tmp_path: Path) -> None:
    own = {**user_work.objects(), **OPTIONS, "budget": 12}
    own["loss"] = lambda model, batch: user_work.loss(model, batch)  # cannot be sent: all runs use this process
    over = {"adamw.lr": [1e-4, 1e-3, 1e-2, 1e-1]}
    found = thrifty.sweep(over=over, reduction=2, runs=tmp_path, name="found", **own)
    assert [len(trial["rungs"]) for trial in found.trials] == [3, 2, 1, 1]
    assert found.table().as_dict()[0]["trial"] == found.best.folder.name
    plain = thrifty.train(settings=found.best_settings, name="plain", runs=tmp_path, **own)
    assert equal(plain.folder, found.best.folder) and plain.loss == found.best.loss
    assert found.best.model(user_work.NoisySums(60, 1000)[0]["x"][None]).shape == (1, 2)


def test_a_sweep_is_not_continued_on_other_data(tmp_path: Path) -> None:
    own = {**user_work.objects(), **OPTIONS, "budget": 4, "over": {"adamw.lr": [1e-3, 1e-2]}}
    own |= {"loss": lambda model, batch: user_work.loss(model, batch), "runs": tmp_path, "name": "found", "rungs": 1}
    first = thrifty.sweep(**own)
    assert thrifty.sweep(**own).best_settings == first.best_settings
    with pytest.raises(UsageError, match="started with other data or weights: held_out differ"):
        thrifty.sweep(**own | {"held_out": user_work.NoisySums(60, 5000)})
