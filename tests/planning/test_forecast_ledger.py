"""The ledger of predictions: concurrent appends, damaged lines, and intervals."""

import fcntl
import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from thrifty.machine.machine_info import machine_identity
from thrifty.planning.forecast_ledger import PredictionRecord, entries, prediction_record
from thrifty.training import run_ledger
from thrifty.training.run_ledger import ledger_file, record_forecast, record_run

RECIPE = 'name = "a run"\nseed = 1\n[techniques.optimizers.adamw]\nlr = 0.1\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))


def finished_run(
    folder: Path, status: str = "finished", seconds: float = 0.5, **environment: object
) -> dict[str, object]:
    """Write a run folder of twenty steps with a slow first step. Return the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "environment.json").write_text(json.dumps({"device": "cpu", "ranks": 1} | environment))
    steps = [{"kind": "step", "step": n, "step_seconds": 9.0 if n == 1 else seconds} for n in range(1, 21)]
    (folder / "records.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"kind": "st')
    return {"status": status, "predicted_memory": 1e6, "peak_memory": 1.5e6}


def test_finished_runs_are_recorded_with_their_predictions(tmp_path: Path) -> None:
    record_forecast(
        {"seed": 1, "techniques": {"optimizers": {"adamw": {"lr": 0.1}}}, "name": "other"}, {"step": 0.4, "memory": 2e6}
    )
    record_run(tmp_path / "run", finished_run(tmp_path / "run"))
    (entry,) = entries("cpu")
    assert entry.run == "run" and entry.measured == {"memory": 1.5e6, "step": 0.5}
    assert entry.predicted == {"counted": 1e6, "step": 0.4, "memory": 2e6}
    assert prediction_record([entry], "step", "step").ratios == (1.25,)
    assert prediction_record([entry], "counted", "memory").error == 0.5


def test_disturbed_steps_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.5, 0.5))
    record_run(tmp_path / "run", finished_run(tmp_path / "run"))
    (entry,) = entries("cpu")
    assert entry.measured == {"memory": 1.5e6}


def test_interrupted_runs_are_not_recorded(tmp_path: Path) -> None:
    record_run(tmp_path / "a", finished_run(tmp_path / "a", status="interrupted"))
    record_run(tmp_path / "b", finished_run(tmp_path / "b", ranks=2))
    assert [(entry.run, entry.ranks) for entry in entries("cpu")] == [("b", 2)]


def test_ledger_failures_do_not_affect_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(tmp_path / "nowhere", {"status": "finished"})
    summary = finished_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path / "file" / "below"))
    record_run(tmp_path / "run", summary)
    record_forecast({}, {"step": 1.0})
    assert entries("cpu") == []


def test_users_without_a_home_have_no_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("THRIFTY_CACHE")
    monkeypatch.setattr(Path, "home", nowhere)
    record_run(tmp_path / "run", finished_run(tmp_path / "run"))
    record_forecast({}, {"step": 1.0})
    assert entries("cpu") == []


def test_a_stuck_writer_does_not_block_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ledger, "PATIENCE", 0.05)
    ledger_file().parent.mkdir(parents=True)
    with ledger_file().open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        record_run(tmp_path / "run", finished_run(tmp_path / "run"))
    assert entries("cpu") == []
    record_run(tmp_path / "run", finished_run(tmp_path / "run"))
    assert len(entries("cpu")) == 1


def test_damaged_lines_and_other_machines_are_skipped(tmp_path: Path) -> None:
    record_run(tmp_path / "run", finished_run(tmp_path / "run"))
    line = ledger_file().read_text()
    other = json.loads(line) | {"machine": machine_identity("cpu") | {"device": "another"}}
    ledger_file().write_text("no json\n" + line[:20] + "\n" + json.dumps(other) + "\n[1]\n" + line)
    assert [entry.run for entry in entries("cpu")] == ["run"]


def _write_many(writer: int) -> None:
    for number in range(50):
        run_ledger._append({"run": f"{writer}/{number}", "text": "x" * 5000})


def test_concurrent_writers_keep_every_line() -> None:
    with ProcessPoolExecutor(4, get_context("fork")) as processes:
        list(processes.map(_write_many, range(4)))
    names = [json.loads(line)["run"] for line in ledger_file().read_text().splitlines()]
    assert sorted(names) == sorted(f"{writer}/{number}" for writer in range(4) for number in range(50))


def test_few_runs_only_widen_intervals() -> None:
    none = PredictionRecord(()).around(10.0, 0.9, 1.1)
    assert (none.low, none.high) == (9.0, pytest.approx(11.0)) and PredictionRecord(()).error is None
    far = PredictionRecord((1.4, 0.95)).around(10.0, 0.9, 1.1)
    assert (far.low, far.high) == (9.0, 14.0)


def test_coverage_of_intervals_from_runs() -> None:
    draws, held, number = np.random.default_rng(0), 0, 600
    for _ in range(number):
        ratios = np.exp(draws.normal(0.05, 0.1, 41))
        result = PredictionRecord(tuple(ratios[:40])).around(1.0, 0.5, 2.0)
        held += result.low <= ratios[40] <= result.high
    assert 0.86 <= held / number <= 0.97
