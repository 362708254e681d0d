"""Longer budgets of existing runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thrifty as th
from thrifty.core.errors import UsageError
from thrifty.core.recipe import Budget
from thrifty.training.budget_extension import extend


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum()}


def build() -> nn.Module:
    return nn.Linear(4, 1)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]).square()


OBJECTS: dict[str, Any] = {"model": build, "data": Numbers(), "held_out": Numbers(), "loss": loss, "quiet": True}


def trained(folder: Path, budget: str = "6 steps", **settings: Any) -> Path:
    settings = {"evaluation.examples": 8, "checkpoints.every": 3, "techniques.schedules.linear.warmup": 1, **settings}
    th.train(**OBJECTS, batch=8, name="run", budget=budget, runs=folder, settings=settings)
    return folder / "run"


def steps(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and learning rate of each step; of a repeated step, the last record."""
    records = map(json.loads, (run / "records.jsonl").read_text().splitlines())
    return {each["step"]: (each["loss"], each["learning_rate"]) for each in records if each["kind"] == "step"}


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def test_the_peak_memory_is_that_of_all_parts(tmp_path: Path) -> None:
    run = trained(tmp_path)
    first = {**summary(run), "process_memory": 8e9, "peak_memory": 2e9}
    (run / "summary.json").write_text(json.dumps(first))
    th.resume(run, budget="+6 steps", **OBJECTS)
    assert (summary(run)["process_memory"], summary(run)["peak_memory"]) == (8e9, 2e9)
    (run / "summary.json").write_text(json.dumps({**first, "process_memory": 1e6, "peak_memory": 1e6}))
    th.resume(run, budget="+6 steps", **OBJECTS)
    assert summary(run)["process_memory"] > 1e7 and summary(run)["peak_memory"] > 0


def test_finished_run_continues_with_a_longer_schedule(tmp_path: Path) -> None:
    run = trained(tmp_path)
    first = steps(run)
    th.resume(run, budget="+6 steps", **OBJECTS)
    assert summary(run)["status"] == "finished" and summary(run)["steps"] == 12
    longer = steps(run)
    assert {step: longer[step] for step in first} == first
    whole = steps(trained(tmp_path / "whole", "12 steps"))
    assert [longer[step][1] for step in range(7, 13)] == [whole[step][1] for step in range(7, 13)]
    (change,) = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines() if '"length"' in line]
    assert change["asked"] == "+6 steps" and change["extended"]["steps"] == 12 and change["step"] == 6
    assert json.loads((run / "origins.json").read_text())["budget.steps"] == "--budget +6 steps"


class Killed(BaseException):
    pass


def kill(record: th.Record) -> None:
    if record.step == 8:  # before the next checkpoint
        raise Killed


@pytest.mark.parametrize("interruption", ["saved", "killed", "killed and damaged"])
def test_interrupted_extension_resumes_exactly(interruption: str, tmp_path: Path) -> None:
    run = trained(tmp_path)
    twin = Path(shutil.copytree(run, tmp_path / "twin"))
    th.resume(twin, budget="+6 steps", **OBJECTS)
    if interruption == "saved":
        th.resume(run, budget="+6 steps", **OBJECTS, observers=[lambda record: record.step < 8])
    else:
        with pytest.raises(Killed):
            th.resume(run, budget="+6 steps", **OBJECTS, observers=[kill])
    if interruption == "killed and damaged":
        (run / "checkpoints" / "step-00000006" / "tensors.safetensors").write_bytes(b"")
    th.resume(run, **OBJECTS)
    assert summary(run)["status"] == "finished"
    assert steps(run) == steps(twin)
    with pytest.raises(UsageError, match="it made all its 12 steps"):
        th.resume(run, **OBJECTS)


@pytest.mark.parametrize(
    ("budget", "extension", "length"),
    [
        ("2 epochs", "+1 epochs", 6),
        ("4 steps", "+1 epochs", 6),
        ("32 tokens", "+16 tokens", 6),
        ("2 epochs", "+3 steps", 7),
    ],
)
def test_extension_adds_any_unit(budget: str, extension: str, length: int, tmp_path: Path) -> None:
    run = trained(tmp_path, budget)
    th.resume(run, budget=extension, **OBJECTS)
    assert summary(run)["steps"] == length
    th.resume(run, budget="+1 steps", **OBJECTS)
    assert summary(run)["steps"] == length + 1


def test_extension_in_seconds_follows_the_used_time() -> None:
    counters = {"seconds": 50.0, "used_seconds": 58.0}
    timed = Budget(seconds=60.0)
    assert extend(timed, {"seconds": 58.0}, 100, 100, counters, lambda budget: 0) == (Budget(seconds=118.0), 203)
    stepped = Budget(steps=100)
    assert extend(stepped, {"seconds": 58.0}, 100, 100, counters, lambda budget: 0) == (Budget(seconds=116.0), 200)
    training = Budget(seconds=60.0, counts="training")
    budget, length = extend(training, {"seconds": 40.0}, 100, 100, counters, lambda budget: 0)
    assert (budget, length) == (Budget(seconds=100.0, counts="training"), 200)


def test_run_in_steps_continues_for_seconds(tmp_path: Path) -> None:
    run = trained(tmp_path)
    th.resume(run, budget="+2s", **OBJECTS)
    ended = summary(run)
    assert ended["status"] == "finished" and ended["steps"] > 6
    assert ended["used_seconds"] > ended["budget_seconds"] - 2


def test_extension_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path)
    before = (run / "records.jsonl").read_bytes()
    for extension, fork, says in (
        ("6 steps", None, "'6 steps' is not an extension of the budget\n.*budget=\"\\+6steps\""),
        ("+6 miles", None, "'6 miles' is not an amount"),
        ("+6 steps", "other", "--fork starts the new run 'other'"),
    ):
        with pytest.raises(UsageError, match=says):
            th.resume(run, budget=extension, fork=fork, **OBJECTS)
    early = trained(tmp_path / "early", "90 steps", **{"evaluation.patience": 1, "evaluation.every": 1, "seed": 1})
    if "stopped_early" in summary(early):
        with pytest.raises(UsageError, match="it stopped early"):
            th.resume(early, budget="+6 steps", **OBJECTS)
    assert (run / "records.jsonl").read_bytes() == before
