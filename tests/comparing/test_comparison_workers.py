"""Parallel runs of a comparison: paired runs on one worker, stops of all workers, and command-line workers."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier, Event

import pytest
from simulated_runs import Simulated, variants
from small_recipes import tiny_digits

from thrifty.comparing.comparison import compare
from thrifty.comparing.comparison_protocol import ComparisonProtocol
from thrifty.comparing.comparison_workers import read_workers
from thrifty.comparing.run_launchers import STOPPED, RunExit, Worker
from thrifty.comparing.run_process import run_to_end
from thrifty.core.errors import UsageError
from thrifty.core.mesh import Mesh
from thrifty.core.recipe import Budget, EvaluationSettings, Recipe
from thrifty.reporting.comparison_page import cautions
from thrifty.techniques.parallelism.replicate import ReplicatedDataParallel

PROTOCOL = ComparisonProtocol(equal="steps", seeds=4, trials=1)


@dataclass
class SynchronizedWorker(Simulated):
    """A worker whose first run with a seed waits until all other workers also run a seed."""

    barrier: Barrier = field(default_factory=lambda: Barrier(1))

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        if "-seed-" in recipe.name and not any("-seed-" in name for name in self.started):
            self.barrier.wait(30)
        return super().__call__(recipe, runs)


def seeds_of(worker: Simulated) -> list[str]:
    return [name.partition("-seed-")[2] for name in worker.started if "-seed-" in name]


def test_workers_run_in_parallel_and_a_pair_stays_in_one(tmp_path: Path) -> None:
    alone = compare(variants("batch 16: --set data.batch=16"), PROTOCOL, tmp_path / "alone", workers=[Simulated()])
    both = Barrier(2)
    workers = [SynchronizedWorker(barrier=both), SynchronizedWorker(barrier=both)]
    result = compare(variants("batch 16: --set data.batch=16"), PROTOCOL, tmp_path / "race", workers=workers)
    assert result["outcome"] == alone["outcome"]
    assert all(seeds_of(workers[0])) and all(seeds_of(workers[1]))
    assert not {*seeds_of(workers[0])} & {*seeds_of(workers[1])}
    assert sorted(seeds_of(workers[0]) + seeds_of(workers[1])) == sorted("00112233")


@dataclass
class InterruptedWorker(Simulated):
    """A worker that is interrupted in its first run with a seed, while another worker makes a run with a seed."""

    is_other_busy: Event = field(default_factory=Event)

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        if "-seed-" not in recipe.name:
            return super().__call__(recipe, runs)
        assert self.is_other_busy.wait(30)
        return STOPPED


@dataclass
class WaitingWorker(Simulated):
    """A worker whose first run with a seed ends only when a stop is requested."""

    stop_requested: Event = field(default_factory=Event)
    is_busy: Event = field(default_factory=Event)

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        if "-seed-" not in recipe.name or self.stop_requested.is_set():
            return super().__call__(recipe, runs)
        self.started.append(recipe.name)
        self.is_busy.set()
        assert self.stop_requested.wait(30)
        return STOPPED

    def stop(self) -> None:
        self.stop_requested.set()


def test_stop_in_one_worker_stops_all_and_can_be_resumed(tmp_path: Path) -> None:
    whole = compare(variants("batch 16: --set data.batch=16"), PROTOCOL, tmp_path / "whole", workers=[Simulated()])
    waiting = WaitingWorker()
    workers = [InterruptedWorker(is_other_busy=waiting.is_busy), waiting]
    first = compare(variants("batch 16: --set data.batch=16"), PROTOCOL, tmp_path / "race", workers=workers)
    assert (first["status"], first["exit_code"]) == ("interrupted", 143)
    assert workers[0].stopped and len(workers[1].started) <= 1
    assert not any("seed" in entry for entry in first["runs"])
    again = compare(
        variants("batch 16: --set data.batch=16"), PROTOCOL, tmp_path / "race", workers=[Simulated(), Simulated()]
    )
    assert again["outcome"] == whole["outcome"]


def test_runs_on_different_machines_cause_a_caution(tmp_path: Path) -> None:
    both = Barrier(2)
    workers = [SynchronizedWorker(processor="old", barrier=both), SynchronizedWorker(processor="new", barrier=both)]
    result = compare(variants("batch 16: --set data.batch=16"), PROTOCOL, tmp_path / "race", workers=workers)
    assert any("different machines" in one and "new, cpu; old, cpu" in one for one in cautions(result))


@pytest.mark.parametrize(("slow", "is_disturbed"), [(1.2, False), (3.0, True)])
def test_step_times_that_differ_between_runs_cause_a_caution(slow: float, is_disturbed: bool, tmp_path: Path) -> None:
    start = Simulated(step_time=lambda recipe: 0.01 * (slow if recipe.name == "variant-1-seed-1" else 1.0))
    protocol = replace(PROTOCOL, equal="steps")
    result = compare(variants("batch 16: --set data.batch=16"), protocol, tmp_path / "race", workers=[start])
    said = [each for each in cautions(result) if "do not compare times" in each]
    assert [each.startswith("a step of batch 16 took 0.01") for each in said] == [True] * is_disturbed


def test_typed_workers_are_parsed() -> None:
    assert read_workers([], "time") == read_workers(["here"], "time") == [Worker()]
    assert read_workers(["srun -w 'node b'", "here"], "time") == [Worker(("srun", "-w", "node b")), Worker()]
    first, second = read_workers(["here", "here"], "steps")
    assert first.threads == second.threads > 0


@pytest.mark.parametrize(
    ("texts", "words"),
    [(["here", "here"], "slow each other down"), ([" "], "'' is not a command"), (["srun 'a"], "is not a command")],
)
def test_invalid_workers_are_refused(texts: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_workers(texts, "time")


def short(ranks: int) -> Recipe:
    recipe = tiny_digits()
    return replace(
        recipe,
        name="run",
        model=replace(recipe.model, depth=1),
        budget=Budget(steps=3),
        evaluation=EvaluationSettings(every=10_000, examples=64),
        techniques=(*recipe.techniques, *([ReplicatedDataParallel()] if ranks > 1 else [])),
        mesh=Mesh(replicate=ranks if ranks > 1 else 0),
    )


@pytest.mark.slow
def test_launcher_run_on_two_ranks_equals_one_rank(tmp_path: Path) -> None:
    launcher = tmp_path / "launch"
    launcher.write_text('#!/bin/sh\necho "$1" > "$0.ed"\nshift\nexec "$@"\n')
    launcher.chmod(0o755)
    ended = Worker([str(launcher), "there"])(short(2), tmp_path / "pair")
    assert (ended.status, ended.error) == ("finished", "")
    assert (tmp_path / "launch.ed").read_text() == "there\n"
    assert ended.joules is None  # it ran on another machine
    alone = run_to_end(short(1), tmp_path / "alone")["held_out_loss"]
    two = run_to_end(short(2), tmp_path / "pair")  # already finished: only its summary is read
    assert two["held_out_loss"] == pytest.approx(alone, rel=1e-4)
    assert '"ranks": 2' in (tmp_path / "pair" / "run" / "environment.json").read_text()
    assert [file.name for file in (tmp_path / "pair").iterdir()] == ["run"]


def test_failed_launcher_reports_its_error(tmp_path: Path) -> None:
    ended = Worker([sys.executable, "-c", "raise SystemExit('no such node')"])(short(1), tmp_path)
    assert ended.status == "failed" and ended.error == "no such node"
    stopped = Worker()
    stopped.stop()
    assert stopped(short(1), tmp_path) == STOPPED and not [*tmp_path.iterdir()]
