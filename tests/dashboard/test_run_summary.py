"""Summary of a run: state, latest values, and constant cost of reading."""

import json
import os
import socket
from itertools import pairwise

import pytest
from report_folders import records, summary

from thrifty.dashboard import run_summary
from thrifty.dashboard.run_summary import RunSummary, sampled_losses
from thrifty.machine.lock_owner import lock_owner
from thrifty.reporting.run_state import FINISHED, KILLED, RUNNING, WAITING
from thrifty.training.run_lock import RunLock


def look(folder):
    return RunSummary(folder.name, folder).refresh()


def test_a_finished_run_shows_its_last_numbers(run_folder):
    made = records(120, every=10)
    folder = run_folder(records=made)
    row = look(folder)
    assert (
        row.state == FINISHED and (row.step, row.steps) == (120, 600) and row.recipe == "llama-nano · king-james-bible"
    )
    steps = [record for record in made if record["kind"] == "step"]
    assert row.loss == steps[-1]["loss"] and row.held_out_loss == summary(made)["held_out_loss"]
    assert row.techniques[0] == "precision.mixed" and row.tokens_per_second == pytest.approx(33_000, rel=0.1)


@pytest.mark.parametrize(
    ("status", "state", "reason"),
    [
        ("interrupted", "interrupted", "by a signal"),
        ("stopped", "stopped", "by an error"),
        ("running", KILLED, "the process ended without writing a status"),
    ],
)
def test_a_run_without_lock_owner_has_stopped_with_a_reason(run_folder, status, state, reason):
    row = look(run_folder(summary={"status": status, "steps": 60}))
    assert (row.state, row.reason) == (state, reason)


def test_a_run_with_steps_past_its_summary_is_not_finished(run_folder):
    folder = run_folder(records=records(120), summary={"status": "finished", "steps": 60})
    assert look(folder).state == KILLED


def test_a_run_whose_lock_is_held_is_running(run_folder):
    folder = run_folder(summary={"status": "running", "steps": 0})
    lock = RunLock(folder / "lock")
    try:
        row = look(folder)
        assert row.state == RUNNING and row.reason == f"process {os.getpid()} on {socket.gethostname()}"
    finally:
        lock.release()
    assert look(folder).state == KILLED


def test_lock_owner_takes_no_lock_and_ignores_dead_processes(tmp_path):
    file = tmp_path / "lock"
    assert lock_owner(file) == {}
    lock = RunLock(file)
    assert lock_owner(file)["pid"] == os.getpid()
    lock.release()
    assert lock_owner(file) == {}
    dead = {"pid": 2**22 - 1, "host": socket.gethostname(), "started": 1.0}
    file.write_text(json.dumps(dead))
    assert lock_owner(file) == {}
    file.write_text(json.dumps(dead | {"host": "another-machine"}))
    assert lock_owner(file)["host"] == "another-machine"
    file.write_text("damaged")
    assert lock_owner(file) == {}


def test_a_run_before_its_first_record_is_waiting(run_folder):
    row = look(run_folder(records=None, summary=None, explanation=None))
    assert row.state == WAITING and row.step == 0 and row.loss is None and row.sparkline == ()


def test_damaged_files_leave_the_rest(run_folder):
    folder = run_folder(recipe="= no toml", summary=None, explanation=None)
    (folder / "summary.json").write_text("{")
    (folder / "explanation.json").write_text('{"techniques": [3, {"name": "a.b"}]}')
    row = look(folder)
    assert row.recipe == "" and row.techniques == ("a.b",) and row.step == 120


def test_appended_records_appear_at_the_next_refresh(run_folder):
    folder = run_folder(records=records(50), summary={"status": "running", "steps": 0})
    seen = RunSummary("kjv", folder)
    assert seen.refresh().step == 50
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 51, "loss": 1.25, "tokens_per_second": 5.0}\n')
    row = seen.refresh()
    assert (row.step, row.loss) == (51, 1.25)


def test_a_fixed_amount_of_a_long_run_is_read(run_folder, monkeypatch):
    folder = run_folder(records=records(20_000))
    size = (folder / "records.jsonl").stat().st_size
    parsed = []
    plain = run_summary.parse_record
    monkeypatch.setattr(run_summary, "parse_record", lambda line: (parsed.append(len(line)), plain(line))[1])
    row = look(folder)
    assert row.step == 20_000 and len(row.sparkline) == run_summary.SAMPLES
    assert sum(parsed) < run_summary.FROM_END + run_summary.SAMPLES * run_summary.AROUND < size / 10


def test_sampled_losses_span_the_run(run_folder):
    made = records(3000)
    file = run_folder(records=made) / "records.jsonl"
    losses = {record["step"]: record["loss"] for record in made if record["kind"] == "step"}
    sampled = sampled_losses(file, file.stat().st_size)
    assert all(losses[point.step] == point.value for point in sampled)
    assert sampled[0].step <= 2 and sampled[-1].step >= 2985
    gaps = [after.step - before.step for before, after in pairwise(sampled)]
    assert max(gaps) < 2 * 3000 / run_summary.SAMPLES


@pytest.mark.parametrize("how", ["appended", "replaced"])
def test_after_a_long_pause_only_the_end_is_read(run_folder, monkeypatch, how):
    folder = run_folder(records=records(50))
    seen = RunSummary("kjv", folder)
    seen.refresh()
    lines = "".join(json.dumps(record) + "\n" for record in records(20_000))
    if how == "replaced":
        (folder / "records.jsonl").unlink()
    with (folder / "records.jsonl").open("a") as file:
        file.write(lines)
    parsed = []
    plain = run_summary.parse_record
    monkeypatch.setattr(run_summary, "parse_record", lambda line: (parsed.append(len(line)), plain(line))[1])
    assert seen.refresh().step == 20_000
    most = run_summary.FROM_END + run_summary.SAMPLES * run_summary.AROUND
    assert sum(parsed) < (most if how == "appended" else most + seen.tail.chunk)


@pytest.mark.parametrize("pid", [-5, 2**80, "Infinity"])
def test_a_lock_file_with_an_impossible_pid_has_no_owner(tmp_path, pid):
    file = tmp_path / "lock"
    file.write_text(f'{{"pid": {pid}, "host": "{socket.gethostname()}", "started": 1.0}}')
    assert lock_owner(file) == {}


def test_huge_numbers_and_pipes_do_not_break_the_list(run_folder):
    huge = "1" + 400 * "0"
    folder = run_folder(summary=None)
    (folder / "records.jsonl").write_text(f'{{"kind": "step", "step": {huge}}}\n{{"kind": "step", "step": 7}}\n')
    (folder / "summary.json").write_text(f'{{"steps": {huge}, "loss": {huge}}}')
    assert look(folder).step == 7
    for name in ("records.jsonl", "summary.json", "recipe.toml", "lock"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert look(folder).state == WAITING
