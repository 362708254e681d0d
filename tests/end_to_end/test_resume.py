"""A run killed anywhere and resumed equals the run that was never killed, bit for bit."""

import random
import re
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import CommandLine, assert_equal, kill, wait_until
from table_samples import whole_tables

from thrifty.reporting.run_record import read_run

PER_STEP = 8 * 32
GROWING = ("--with", "growth.stacking:at=[8,16]", "--with", "sparsity.rigl:every=4,density=0.5")
SAMPLING = ("--with", "data_selection.gradient_norm_sampling:presample=2,momentum=0.5")


def killed_again_and_again(
    thrifty: CommandLine, name: str, words: list[str], kills: int, window: float, ranks: int = 0, seed: int = 0
) -> int:
    """Train with SIGKILL at random moments and a resume each time until the run is finished; return the kills during a
    save.

    Every other kill comes as soon as a save is in progress. The others come up to `window` seconds after the process
    first wrote something that it must not lose.
    """
    rng = random.Random(seed)
    checkpoints, in_a_save = thrifty.run(name) / "checkpoints", 0
    for turn in range(kills):
        before = entries(checkpoints)
        process = thrifty.start(*words, ranks=ranks)
        moving = wait_until(lambda before=before: entries(checkpoints) - before, process)
        assert moving, f"ended by itself: {process.communicate()}"
        if turn % 2:
            time.sleep(rng.uniform(0, window))
        else:
            wait_until(lambda: any(".partial-" in entry for entry in entries(checkpoints)), process)
        assert process.poll() is None, f"the run is too short to be killed {kills} times"
        kill(process)
        in_a_save += any(".partial-" in entry for entry in entries(checkpoints))
        words = ["resume", name]
    thrifty("resume", name, ranks=ranks)
    return in_a_save


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def assert_records_are_whole(thrifty: CommandLine, name: str, steps: int, per_step: int = PER_STEP) -> None:
    """Assert that the report's reader returns every step once, in order, with the right number of tokens."""
    record = read_run(thrifty.run(name))
    assert [step["step"] for step in record.steps] == list(range(1, steps + 1))
    assert [step["tokens"] for step in record.steps] == [per_step * step for step in range(1, steps + 1)]
    assert all(later["seconds"] > earlier["seconds"] for earlier, later in pairwise(record.steps))
    assert not record.damage
    assert record.summary["status"] == "finished" and record.summary["tokens"] == per_step * steps


@pytest.mark.slow
def test_a_run_killed_at_30_random_moments_ends_bit_identical(thrifty: CommandLine) -> None:
    steps, often = 600, {"checkpoints__every": 1, "evaluation__every": 50}
    thrifty.train("whole", steps=steps, checkpoints__every=100, evaluation__every=50)
    words = thrifty.recipe("killed", "--quiet", steps=steps, **often)
    in_a_save = killed_again_and_again(thrifty, "killed", words, kills=30, window=0.2)
    assert in_a_save >= 5
    assert_equal(thrifty.tensors("killed"), thrifty.tensors("whole"))
    assert_records_are_whole(thrifty, "killed", steps)
    losses = [[step["loss"] for step in read_run(thrifty.run(name)).steps] for name in ("whole", "killed")]
    assert losses[0] == losses[1]


def test_resume_is_exact_with_growth_and_moving_masks(thrifty: CommandLine) -> None:
    """Killed just before, at and just after each growth, and twice between updates of the masks."""
    steps, shape = 24, {"model__depth": 4, "evaluation__every": 100}
    thrifty.train("whole", *GROWING, steps=steps, checkpoints__every=100, **shape)
    words = thrifty.recipe("killed", "--quiet", *GROWING, steps=steps, checkpoints__every=1, **shape)
    for step in (5, 7, 8, 9, 15, 16, 17, 20) if whole_tables() else (7, 8, 15, 16, 20):
        process = thrifty.start(*words)
        saved = thrifty.run("killed") / "checkpoints"
        assert wait_until(lambda step=step, saved=saved: newest(saved) >= step, process)
        kill(process)
        words = ["resume", "killed", "--quiet"]
    thrifty(*words)
    assert_equal(thrifty.tensors("killed"), thrifty.tensors("whole"))
    assert_records_are_whole(thrifty, "killed", steps)
    events = read_run(thrifty.run("killed")).events
    assert [event["step"] for event in events if event["kind"] == "change"] == [8, 16]


def newest(checkpoints: Path) -> int:
    return max((int(name[5:13]) for name in entries(checkpoints) if re.fullmatch(r"step-\d+", name)), default=0)


@pytest.mark.slow
def test_resume_is_exact_with_selection_by_the_model(thrifty: CommandLine) -> None:
    steps = 40
    thrifty.train("whole", *SAMPLING, steps=steps, checkpoints__every=100)
    words = thrifty.recipe("killed", "--quiet", *SAMPLING, steps=steps, checkpoints__every=1)
    killed_again_and_again(thrifty, "killed", words, kills=3, window=0.35)
    assert_equal(thrifty.tensors("killed"), thrifty.tensors("whole"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("technique", ["parallelism.shard", "parallelism.replicate"])
def test_resume_is_exact_with_two_ranks(thrifty: CommandLine, technique: str) -> None:
    steps, chosen = 30, ("--with", technique)
    thrifty.train("whole", *chosen, steps=steps, ranks=2, checkpoints__every=100, evaluation__every=10)
    often = {"checkpoints__every": 1, "evaluation__every": 10}
    words = thrifty.recipe("killed", "--quiet", *chosen, steps=steps, **often)
    killed_again_and_again(thrifty, "killed", words, kills=4 if whole_tables() else 2, window=0.4, ranks=2)
    assert_equal(thrifty.tensors("killed"), thrifty.tensors("whole"))
    assert_records_are_whole(thrifty, "killed", steps)


def test_a_run_killed_before_its_first_checkpoint_restarts(thrifty: CommandLine) -> None:
    thrifty.train("whole", steps=30)
    process = thrifty.start(*thrifty.recipe("killed", "--quiet", steps=30))
    assert wait_until(lambda: (thrifty.run("killed") / "records.jsonl").is_file(), process)
    kill(process)
    done = thrifty("resume", "killed")
    assert "before its first checkpoint" in done.stderr
    assert_equal(thrifty.tensors("killed"), thrifty.tensors("whole"))
    assert_records_are_whole(thrifty, "killed", 30)


def test_resume_keeps_the_files_of_the_first_start(thrifty: CommandLine) -> None:
    words = thrifty.recipe("run", steps=4000, checkpoints__every=1)
    process = thrifty.start(*words)
    assert wait_until(lambda: entries(thrifty.run("run") / "checkpoints"), process)
    before = read_run(thrifty.run("run"))
    assert before.origins["data.batch"] == "--set" and before.environment["command"][-len(words) :] == words
    kill(process)
    for _ in range(2):
        there = len(thrifty.records("run", "checkpoint"))
        process = thrifty.start("resume", "run")
        assert wait_until(lambda there=there: len(thrifty.records("run", "checkpoint")) > there, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        after = read_run(thrifty.run("run"))
        assert after.origins == before.origins
        assert after.environment == before.environment
        assert after.explanation == before.explanation


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_records_are_reported_on_resume(damage: str, thrifty: CommandLine) -> None:
    thrifty.train("run", steps=4, checkpoints__every=2, evaluation__every=2)
    folder = thrifty.run("run")
    for path in (folder / "checkpoints").glob("step-00000004*"):
        shutil.rmtree(path)
    (folder / "summary.json").unlink()
    lines = (folder / "records.jsonl").read_text().splitlines(keepends=True)
    if damage == "cut":
        lines = lines[:1]
    else:
        lines[0] = lines[0].replace('"loss": 5', '"loss": 4')
    (folder / "records.jsonl").write_text("".join(lines))
    message = thrifty("resume", "run").stderr
    assert f"records.jsonl' has been {damage} since the checkpoint" in message
    assert f"has been {damage}" in " ".join(each["text"] for each in thrifty.records("run", "notice"))


def test_records_after_a_checkpoint_are_no_damage(thrifty: CommandLine) -> None:
    thrifty.train("run", steps=4, checkpoints__every=2, evaluation__every=2)
    folder = thrifty.run("run")
    for path in (folder / "checkpoints").glob("step-00000004*"):
        shutil.rmtree(path)
    (folder / "summary.json").unlink()
    assert "since the checkpoint" not in thrifty("resume", "run").stderr
