"""Runs of a comparison side by side: whole turns in one worker, stops that reach all, and what a worker is typed as."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier, Event

import pytest
from simulated_runs import Simulated, arms
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

TERMS = ComparisonProtocol(equal="steps", seeds=4, trials=1)


@dataclass
class Meeting(Simulated):
    """A worker whose first run with a seed goes on until those of the other workers do too."""

    met: Barrier = field(default_factory=lambda: Barrier(1))

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        if "-seed-" in recipe.name and not any("-seed-" in name for name in self.started):
            self.met.wait(30)
        return super().__call__(recipe, runs)


def seeds_of(worker: Simulated) -> list[str]:
    return [name.partition("-seed-")[2] for name in worker.started if "-seed-" in name]


def test_workers_go_on_side_by_side_and_a_pair_stays_in_one(tmp_path: Path) -> None:
    alone = compare(arms("batch 16: --set data.batch=16"), TERMS, tmp_path / "alone", workers=[Simulated()])
    both = Barrier(2)
    workers = [Meeting(met=both), Meeting(met=both)]
    result = compare(arms("batch 16: --set data.batch=16"), TERMS, tmp_path / "race", workers=workers)
    assert result["outcome"] == alone["outcome"]
    assert all(seeds_of(workers[0])) and all(seeds_of(workers[1]))
    assert not {*seeds_of(workers[0])} & {*seeds_of(workers[1])}
    assert sorted(seeds_of(workers[0]) + seeds_of(workers[1])) == sorted("00112233")


class Stopping(Simulated):
    """A worker that is interrupted in its first run with a seed."""

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        return STOPPED if "-seed-" in recipe.name else super().__call__(recipe, runs)


@dataclass
class Long(Simulated):
    """A worker whose first run with a seed ends only when it is asked to."""

    asked: Event = field(default_factory=Event)

    def __call__(self, recipe: Recipe, runs: Path, /) -> RunExit:
        if "-seed-" not in recipe.name or self.asked.is_set():
            return super().__call__(recipe, runs)
        self.started.append(recipe.name)
        assert self.asked.wait(30)
        return STOPPED

    def stop(self) -> None:
        self.asked.set()


def test_a_stop_in_one_worker_stops_the_others_and_the_race_goes_on(tmp_path: Path) -> None:
    whole = compare(arms("batch 16: --set data.batch=16"), TERMS, tmp_path / "whole", workers=[Simulated()])
    workers = [Stopping(), Long()]
    first = compare(arms("batch 16: --set data.batch=16"), TERMS, tmp_path / "race", workers=workers)
    assert (first["status"], first["exit_code"]) == ("interrupted", 143)
    assert workers[0].stopped and len(workers[1].started) <= 1
    assert not any("seed" in entry for entry in first["runs"])
    again = compare(arms("batch 16: --set data.batch=16"), TERMS, tmp_path / "race", workers=[Simulated(), Simulated()])
    assert again["outcome"] == whole["outcome"]


def test_runs_on_unlike_machines_are_told_of(tmp_path: Path) -> None:
    both = Barrier(2)
    workers = [Meeting(processor="old", met=both), Meeting(processor="new", met=both)]
    result = compare(arms("batch 16: --set data.batch=16"), TERMS, tmp_path / "race", workers=workers)
    assert any("unlike machines" in one and "new, cpu; old, cpu" in one for one in cautions(result))


def test_workers_are_read_as_they_are_typed() -> None:
    assert read_workers([], "time") == read_workers(["here"], "time") == [Worker()]
    assert read_workers(["srun -w 'node b'", "here"], "time") == [Worker(("srun", "-w", "node b")), Worker()]
    first, second = read_workers(["here", "here"], "steps")
    assert first.threads == second.threads > 0


@pytest.mark.parametrize(
    ("texts", "words"),
    [(["here", "here"], "take time from each other"), ([" "], "a worker is empty"), (["srun 'a"], "is no command")],
)
def test_workers_that_cannot_be_are_refused(texts: list[str], words: str) -> None:
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
def test_a_run_over_two_ranks_goes_through_a_launcher_and_ends_as_on_one(tmp_path: Path) -> None:
    launcher = tmp_path / "launch"
    launcher.write_text('#!/bin/sh\necho "$1" > "$0.ed"\nshift\nexec "$@"\n')
    launcher.chmod(0o755)
    ended = Worker([str(launcher), "there"])(short(2), tmp_path / "pair")
    assert (ended.status, ended.error) == ("finished", "")
    assert (tmp_path / "launch.ed").read_text() == "there\n"
    assert ended.joules is None  # of another machine
    alone = run_to_end(short(1), tmp_path / "alone")["held_out_loss"]
    two = run_to_end(short(2), tmp_path / "pair")  # finished: told as it is
    assert two["held_out_loss"] == pytest.approx(alone, rel=1e-4)
    assert '"ranks": 2' in (tmp_path / "pair" / "run" / "environment.json").read_text()
    assert [file.name for file in (tmp_path / "pair").iterdir()] == ["run"]


def test_a_launcher_that_fails_says_why(tmp_path: Path) -> None:
    ended = Worker([sys.executable, "-c", "raise SystemExit('no such node')"])(short(1), tmp_path)
    assert ended.status == "failed" and ended.error == "no such node"
    stopped = Worker()
    stopped.stop()
    assert stopped(short(1), tmp_path) == STOPPED and not [*tmp_path.iterdir()]
