"""Real runs of a comparison: processes that save when the parent process dies, and resume."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread, Timer

import psutil
import pytest
from command_line import CommandLine, kill, wait_until
from simulated_runs import by_kind
from small_recipes import tiny_digits

from thrifty.comparing.comparison import compare
from thrifty.comparing.comparison_protocol import ComparisonProtocol
from thrifty.comparing.run_launchers import RunExit, SameProcess, Worker, wait_for_release
from thrifty.comparing.run_process import run_to_end, summary_of
from thrifty.comparing.variants import Variant
from thrifty.core.recipe import Budget, CheckpointSettings, EvaluationSettings, Recipe
from thrifty.machine.lock_owner import lock_owner
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.techniques.compile import CompiledBlocks
from thrifty.training.run_lock import RunLock


def short(name: str, steps: int) -> Recipe:
    recipe, few = tiny_digits(), EvaluationSettings(every=10_000, examples=64)
    return replace(
        recipe,
        name=name,
        model=replace(recipe.model, depth=1),
        budget=Budget(steps=steps),
        evaluation=few,
        checkpoints=CheckpointSettings(every=10_000),
    )


@pytest.fixture
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


@pytest.mark.slow
def test_forked_run_equals_a_new_process(tmp_path: Path, worker: Worker) -> None:
    """The peak memory does not include the memory of earlier runs."""
    recipe, new = short("run", 2), Worker(["env"])
    assert [start(recipe, tmp_path / name).status for name, start in (("new", new), ("fork", worker))] == [
        "finished"
    ] * 2
    one, other = (summary_of(tmp_path / name / "run") for name in ("new", "fork"))
    assert one["held_out_loss"] == other["held_out_loss"]
    assert other["peak_memory"] == pytest.approx(one["peak_memory"], abs=4e6)
    files = [{file.name for file in (tmp_path / name / "run").iterdir()} for name in ("new", "fork")]
    assert files[0] == files[1] and [file.name for file in (tmp_path / "fork").iterdir()] == ["run"]


def is_training(run: Path) -> bool:
    return (run / "records.jsonl").is_file() and '"step"' in (run / "records.jsonl").read_text()


@pytest.mark.slow
def test_run_saves_when_its_parent_dies_and_resumes(tmp_path: Path, worker: Worker) -> None:
    recipe = short("run", 400)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe_to_data(recipe)))
    program = """
import json, pathlib
from thrifty.comparing.run_launchers import Worker
from thrifty.recipes.recipe_toml import recipe_from_data
Worker()(recipe_from_data(json.loads(pathlib.Path("recipe.json").read_text())), pathlib.Path("cut"))
"""
    parent = psutil.Popen([sys.executable, "-c", program], cwd=tmp_path)
    wait_until(lambda: is_training(tmp_path / "cut" / "run"), parent, seconds=120)
    (server,) = parent.children()
    (run,) = server.children()
    parent.kill()
    assert not psutil.wait_procs([parent, server, run], timeout=60)[1]
    assert summary_of(tmp_path / "cut" / "run")["status"] == "interrupted"
    ended = worker(recipe, tmp_path / "cut")
    assert (ended.status, ended.error) == ("finished", "")
    assert ended.joules is None  # the energy before the interruption is unknown
    whole = run_to_end(recipe, tmp_path / "whole")
    assert summary_of(tmp_path / "cut" / "run")["held_out_loss"] == whole["held_out_loss"]
    assert run_to_end(recipe, tmp_path / "whole") == whole


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["run", "server"])
def test_killed_process_is_a_failed_run(victim: str, tmp_path: Path, worker: Worker) -> None:
    recipe, ends = short("run", 400), []
    thread = Thread(target=lambda: ends.append(worker(recipe, tmp_path)))
    thread.start()
    wait_until(lambda: is_training(tmp_path / "run"), seconds=120)
    run = psutil.Process(lock_owner(tmp_path / "run" / "lock")["pid"])
    (run if victim == "run" else run.parent()).kill()
    thread.join(60)
    assert ends[0].status == "failed" and "ended by signal 9" in ends[0].error
    assert worker(recipe, tmp_path).status == "finished"


def test_a_run_too_short_for_compilation_resumes(tmp_path: Path) -> None:
    """The start leaves out the compilation of the recipe, for example in the trials of a sweep."""
    recipe = short("run", 4)
    recipe = replace(recipe, techniques=(*recipe.techniques, CompiledBlocks(least_steps=100)))
    paused = replace(recipe, checkpoints=replace(recipe.checkpoints, pause_at=0.5))
    first = run_to_end(paused, tmp_path)
    assert (first["status"], first["steps"]) == ("interrupted", 2)
    ended = run_to_end(recipe, tmp_path)
    assert (ended["status"], ended["steps"]) == ("finished", 4)


def test_failed_run_reports_its_error(tmp_path: Path, worker: Worker) -> None:
    recipe = short("run", 2)
    wrong = replace(recipe, model=replace(recipe.model, patch=3))
    ended = worker(wrong, tmp_path)
    assert ended.status == "failed" and ended.exit_code == 2
    assert "patch" in ended.error and "Traceback" not in ended.error


def test_start_waits_for_a_run_that_is_saving(tmp_path: Path) -> None:
    saving = RunLock(tmp_path / "lock")
    Timer(0.3, saving.release).start()
    assert lock_owner(tmp_path / "lock")
    wait_for_release(tmp_path / "lock")
    assert not lock_owner(tmp_path / "lock")


def test_only_signals_count_as_interruption() -> None:
    codes = {0: "finished", 1: "failed", 2: "failed", 130: "interrupted", 143: "interrupted", -9: "failed"}
    assert {code: RunExit(code, "", 0.0, None).status for code in codes} == codes


@pytest.mark.slow
def test_real_runs_in_one_process(tmp_path: Path) -> None:
    baseline = Variant("baseline", "baseline", short("tiny", 6))
    other = replace(baseline.recipe, data=replace(baseline.recipe.data, batch=16))
    protocol = ComparisonProtocol(equal="flops", seeds=1, trials=1, pilot=4)
    result = compare(
        [baseline, Variant("small", "variant-1", other)], protocol, tmp_path / "race", workers=[SameProcess()]
    )
    assert result["status"] == "finished"
    assert {entry["steps"] for entry in by_kind(result, "seed") if entry["variant"] == "small"} == {
        result["budgets"]["small"]["steps"]
    }
    assert result["budgets"]["small"]["steps"] > 12
    outcome = result["outcome"]["variants"]["small"]
    assert outcome["used"] == pytest.approx(1, rel=0.1)
    assert outcome["measured_differences"].keys() == {"accuracy"}
    assert outcome["verdict"]["verdict"] == "undecided"  # one pair is too few
    recipe = (tmp_path / "race" / "variant-1-seed-0" / "recipe.toml").read_text()
    assert "seed = 0" in recipe and f"steps = {result['budgets']['small']['steps']}" in recipe


TINY = ("--set", "model.width=16", "--set", "model.depth=1", "--set", "model.patch=4", "--budget", "8steps")


@pytest.mark.slow
def test_killed_comparison_resumes(tmp_path: Path) -> None:
    thrifty = CommandLine(tmp_path)
    words = [
        "compare",
        "vit-digits",
        "--variant",
        "--set data.batch=32",
        *TINY,
        "--equal-budget",
        "flops",
        "--seeds",
        "2",
        "--rate-trials",
        "1",
        "--name",
        "race",
    ]
    file = tmp_path / "runs" / "race" / "comparison.json"
    process = thrifty.start(*words)
    wait_until(lambda: file.is_file() and len(json.loads(file.read_bytes())["runs"]) >= 1, process, seconds=300)
    kill(process)
    elapsed = {entry["run"]: entry["elapsed"] for entry in json.loads(file.read_bytes())["runs"]}
    result = thrifty.json(*words, timeout=600)
    assert result["status"] == "finished" and len(result["runs"]) == 4
    assert {entry["run"]: entry["elapsed"] for entry in result["runs"] if entry["run"] in elapsed} == elapsed


@pytest.mark.slow
def test_equal_variants_with_other_seeds_do_not_differ(tmp_path: Path) -> None:
    """Real runs of a variant that differs only in its seed."""
    baseline = Variant("baseline", "baseline", short("tiny", 12))
    protocol = ComparisonProtocol(equal="steps", seeds=8, trials=1, pilot=4)
    other = Variant("equal", "variant-1", replace(baseline.recipe, seed=1000))
    result = compare([baseline, other], protocol, tmp_path / "race", workers=[SameProcess()])
    assert result["outcome"]["variants"]["equal"]["verdict"]["verdict"] == "no difference"
