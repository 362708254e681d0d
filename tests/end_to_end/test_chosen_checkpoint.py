"""Checkpoints chosen by name: `--checkpoint best|last|STEP` of export, sample, chat and report."""

from pathlib import Path

import pytest
import torch
from command_line import CommandLine
from safetensors.torch import load_file

import thrifty as th
from thrifty.core.errors import UsageError
from thrifty.training.checkpoint import load

EARLY = ("--with", "optimizers.adamw:lr=3", "--patience", "2", "--set", "evaluation.every=1")
"""A learning rate so large that held-out losses soon get worse."""


def head(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def stopped_early(desk: CommandLine) -> dict[str, int]:
    """The steps of a run whose last checkpoint is not its best."""
    summary = desk.train("run", *EARLY, steps=30)
    assert "has not improved for 2 evaluations" in summary["stopped_early"] and summary["steps"] < 30
    return desk.json("report", "run")["checkpoints"]


def test_best_last_and_a_step_choose_the_checkpoint(thrifty: CommandLine) -> None:
    steps = stopped_early(thrifty)
    assert steps["best"] == steps["last"] - 2
    stored = {name: load(thrifty.run("run") / "checkpoints", name) for name in ("best", "last")}
    assert {name: each.step for name, each in stored.items()} == steps
    for choice, name in (("best", "best"), ("last", "last"), (str(steps["best"]), "best")):
        folder = f"exported-{choice}"
        exported = thrifty.json("export", "run", folder, "--checkpoint", choice)
        own = next(value for key, value in stored[name].tensors.items() if key.startswith("parameters/embed"))
        assert torch.equal(head(thrifty.folder / folder), own)
        assert bool(exported["notes"]) == (choice == "last")
    assert "--checkpoint best" in thrifty("export", "run", "again").stdout
    texts = {choice: thrifty.json("sample", "run", "--checkpoint", choice)["text"] for choice in ("best", "last")}
    assert texts["best"] != texts["last"]
    in_python = th.sample(thrifty.run("run"), checkpoint="best")
    assert in_python.text == texts["best"]


def test_an_unknown_checkpoint_is_refused(thrifty: CommandLine) -> None:
    thrifty.train("run", steps=2)
    assert "best, last or the step" in thrifty("sample", "run", "--checkpoint", "first", exit_code=2).stderr
    assert "choose one of the steps 2" in thrifty("sample", "run", "--checkpoint", "7", exit_code=4).stderr
    (thrifty.run("run") / "checkpoints" / "BEST").unlink()
    assert "fix: --checkpoint last" in thrifty("export", "run", "out", "--checkpoint", "best", exit_code=4).stderr
    thrifty("export", "run", "out")
    with pytest.raises(UsageError, match="without checkpoints"):
        th.sample(thrifty.folder / "out", checkpoint="best")
