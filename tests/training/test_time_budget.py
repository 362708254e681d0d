"""Budgets in seconds: a run uses its budget although its steps become slower or faster."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thrifty as th
from thrifty.core.errors import UsageError
from thrifty.core.recipe import Budget
from thrifty.training import loop, run_setup, step_budget, time_budget
from thrifty.training.time_budget import TimeBudget, steady

SECONDS = 200.0


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum()}


class Clock:
    """Time of a simulated machine. Each pass of the model takes `cost(now)` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[float], float]):
        self.now, self.cost = 1000.0, cost
        simulated = SimpleNamespace(monotonic=lambda: self.now, perf_counter=lambda: self.now)
        for module in (time_budget, loop, run_setup, step_budget):
            monkeypatch.setattr(module, "time", simulated)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self.now += self.cost(self.now - 1000.0)
        return (model(batch["x"])[:, 0] - batch["y"]).square()


def build() -> nn.Module:
    return nn.Linear(4, 1)


def trained(clock: Clock, folder: Path, name: str = "run", **more: Any) -> dict[str, Any]:
    arguments = {"model": build, "data": Numbers(), "held_out": Numbers(), "loss": clock.loss, "batch": 8}
    arguments |= {"settings": {"evaluation.examples": 8, "checkpoints.every": 20}, "quiet": True}
    th.train(**(arguments | {"name": name, "budget": f"{SECONDS:g}s", "runs": folder} | more))
    return json.loads((folder / name / "summary.json").read_text())


def records(folder: Path, kind: str, name: str = "run") -> list[dict[str, Any]]:
    lines = (folder / name / "records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


MACHINES = {
    "steady": lambda now: 1.0,
    "slower": lambda now: 1.0 if now < SECONDS / 2 else 3.0,
    "faster": lambda now: 2.0 if now < SECONDS / 3 else 0.5,
    "disturbed": lambda now: 0.5 if int(now) // 10 % 2 else 1.0,
    "late": lambda now: 0.25 if now < 0.95 * SECONDS else 1.0,
}


@pytest.mark.parametrize("machine", MACHINES)
def test_run_uses_its_budget(machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = trained(Clock(monkeypatch, MACHINES[machine]), tmp_path)
    assert 0.95 * SECONDS <= summary["used_seconds"] <= 1.01 * SECONDS
    assert records(tmp_path, "length")
    rates = [record["learning_rate"] for record in records(tmp_path, "step")]
    assert rates[-1] < 0.2 * max(rates)  # the schedule ends with the run


def test_budget_of_training_leaves_evaluations_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"evaluation.every": 4, "evaluation.examples": 8, "budget.counts": "training"}
    summary = trained(Clock(monkeypatch, MACHINES["slower"]), tmp_path, settings=settings)
    assert summary["used_seconds"] == summary["seconds"]
    assert 0.95 * SECONDS <= summary["seconds"] <= 1.01 * SECONDS


def test_first_estimate_can_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, MACHINES["steady"])
    summary = trained(clock, tmp_path, settings={"budget.estimate": 20, "budget.counts": "training"})
    assert records(tmp_path, "length")[0]["step"] < 20
    assert 0.95 * SECONDS <= summary["seconds"] <= 1.01 * SECONDS


class Killed(BaseException):
    pass


@pytest.mark.parametrize("counts", ["run", "training"])
def test_resumed_run_repeats_recorded_lengths(counts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, lambda now: 1.0 if now < 0.25 * SECONDS else 3.0)

    def kill(record: th.Record) -> None:
        if record.step == 55:  # after the checkpoint of step 40
            raise Killed

    with pytest.raises(Killed):
        settings = {"evaluation.examples": 8, "checkpoints.every": 20, "budget.counts": counts}
        trained(clock, tmp_path, observers=[kill], settings=settings)
    before, lengths = records(tmp_path, "step"), records(tmp_path, "length")
    assert any(length["step"] > 40 for length in lengths)
    clock.now += 500.0
    th.resume(tmp_path / "run", model=build, data=Numbers(), held_out=Numbers(), loss=clock.loss, quiet=True)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    again = records(tmp_path, "step")[len(before) :]
    for name in ("loss", "learning_rate", "gradient_norm"):
        assert [record[name] for record in before[40:]] == [record[name] for record in again[:15]]
    new = [length for length in records(tmp_path, "length")[len(lengths) :] if length["step"] <= 55]
    repeated = [length for length in lengths if length["step"] >= 40]
    assert [(each["step"], each["steps"]) for each in new] == [(each["step"], each["steps"]) for each in repeated]


@pytest.mark.parametrize("wrong", [{"counts": "all"}, {"estimate": 0}])
def test_wrong_budget_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"budget: {next(iter(wrong))}"):
        Budget(seconds=10.0, **wrong)


def test_rare_slow_steps_do_not_count() -> None:
    assert steady([30.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0])[1:] == [1.0] * 6
    assert steady([1.0] * 4 + [2.0] * 4) == [1.0] * 4 + [2.0] * 4
    interrupted = [30.0, 2.0, *[1.0] * 9, 9.0, 3.0, *[1.0] * 9]
    assert max(steady(interrupted)[2:]) > 1.0 and steady(interrupted, rare=4)[2:] == [1.0] * 20


@pytest.mark.parametrize("every", [3, 4, 10])
def test_periodic_slow_steps_count(every: int) -> None:
    """Otherwise, an update of a preconditioner at every tenth step would be free at equal time."""
    seconds = [6.0 if step % every == 0 else 1.0 for step in range(1, 61)]
    assert steady([30.0, *seconds])[1:] == seconds


def test_compilation_is_no_training_time() -> None:
    budget = TimeBudget(Budget(seconds=100.0, counts="training"), began=0.0)
    times = [300.0] + [1.0] * 9
    for step, seconds in enumerate(times, start=1):
        budget.observe(seconds, is_changed=False)
        assert budget.estimate(step, 50, sum(times[:step]), {}) in (50, 98)  # the compilation does not end the run
    assert budget.used(sum(times)) == 10.0 and budget.estimate(10, 50, sum(times), {}) == 98
    resumed = TimeBudget(budget.budget, began=0.0, step_times=[*times])
    resumed.observe(200.0, is_changed=False)
    resumed.observe(1.0, is_changed=False)
    assert resumed.estimate(12, 98, 510.0, {}) == 98 and resumed.used(510.0) == 12.0


class SlowOnce:
    """Cost of a pass: `slow` seconds for the first pass with gradients and for the first without, then 1 s."""

    def __init__(self, slow: float):
        self.slow, self.seen = slow, set[bool]()

    def __call__(self, now: float) -> float:
        mode = torch.is_grad_enabled()
        is_first = mode not in self.seen
        self.seen.add(mode)
        return self.slow if is_first else 1.0


def test_slow_first_passes_are_not_the_expected_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation and the first evaluation take half of the budget."""
    summary = trained(Clock(monkeypatch, SlowOnce(0.25 * SECONDS)), tmp_path)
    assert 0.95 * SECONDS <= summary["used_seconds"] <= 1.01 * SECONDS and summary["steps"] > 0.4 * SECONDS


def test_an_extension_of_a_run_of_few_slow_steps_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, SlowOnce(18.0))
    short = trained(clock, tmp_path, budget="42s")
    assert short["steps"] <= 5
    clock.cost = SlowOnce(18.0)
    objects: dict[str, Any] = dict(model=build, data=Numbers(), held_out=Numbers(), loss=clock.loss, quiet=True)
    longer = th.resume(tmp_path / "run", budget="+100s", **objects).summary
    assert 0.95 * 142 <= longer["used_seconds"] <= 1.01 * 142 and longer["steps"] > 25
