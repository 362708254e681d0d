"""A rank that dies, hangs or fails ends the run on all ranks with one message; a restart loses no more than
necessary."""

import os
import random
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from command_line import CommandLine, Running, assert_equal, kill, rank_processes, wait_until

from thrifty.training.run_folder import RunFolder

REPLICATED = ("--with", "parallelism.replicate")
STARTING = 180.0
"""Seconds within which a run has started on a busy machine."""
ENDLESS = {"steps": 100_000, "checkpoints__every": 10, "evaluation__every": 100_000}
TROUBLE = '''
    """Trouble: from some step on, rank 1 does what it should not.

    Paper     none.
    Promise   nothing.
    """

    import time
    from dataclasses import dataclass

    import torch.distributed as dist

    from thrifty.core.stages import Stage
    from thrifty.core.technique import Numerics, Technique


    @dataclass(frozen=True)
    class Trouble(Technique):
        stage, numerics = Stage.CLIP, Numerics.DIFFERENT

        kind: str = "loop"

        def backward(self, backward):
            steps = []

            def troubled(model, objective, batch):
                steps.append(len(steps))
                if len(steps) > 6 and dist.get_rank() == 1:
                    while self.kind == "loop":
                        time.sleep(0.01)
                    raise ValueError("a fault of the model")
                return backward(model, objective, batch)

            return troubled
'''


@pytest.fixture
def impatient(thrifty: CommandLine) -> CommandLine:
    """Return a command line with shorter limits of silence than a user's."""
    thrifty.environment |= {"THRIFTY_SILENCE": "10", "THRIFTY_HANG": "10"}
    return thrifty


@pytest.fixture
def troubled(impatient: CommandLine) -> CommandLine:
    """Return a command line that knows the technique `trouble`."""
    home = impatient.folder / "mine"
    home.mkdir()
    (home / "trouble.py").write_text(textwrap.dedent(TROUBLE))
    impatient.environment["THRIFTY_TECHNIQUES"] = str(home)
    return impatient


def made(thrifty: CommandLine, name: str, kind: str = "step") -> list[int]:
    """Return the steps in a run's records so far."""
    there = (thrifty.run(name) / "records.jsonl").is_file()
    return [record["step"] for record in thrifty.records(name, kind)] if there else []


def saved(thrifty: CommandLine, name: str) -> list[int]:
    """Return the steps whose checkpoints were saved, including removed ones."""
    return made(thrifty, name, "checkpoint")


@contextmanager
def running(thrifty: CommandLine, *words: str, restarts: int = 0, fresh: bool = False) -> Iterator[Running]:
    """Run a command on two ranks and end all of its processes; `fresh` starts new processes instead of forks."""
    thrifty.fresh = fresh
    process = thrifty.start(*words, ranks=2, restarts=restarts)
    try:
        yield process
    finally:
        kill(process)


def ended(process: Running, seconds: float = 60) -> str:
    """Return the stderr of ranks and torchrun once they have failed within this many seconds."""
    stderr = process.communicate(timeout=seconds)[1]
    assert process.returncode == 1
    return stderr


def told(stderr: str) -> str:
    """Return the single message with the reason for the end of the run."""
    assert stderr.count("thrifty: ") == 1, stderr
    line = re.search(r"thrifty: (.*)\n  fix: (.*)", stderr)
    assert line, stderr
    return line[0]


@pytest.mark.parametrize(
    ("number", "happened"),
    [
        (signal.SIGKILL, "was killed or crashed"),
        pytest.param(signal.SIGSTOP, r"has sent no heartbeat for 1\d s", marks=pytest.mark.slow),
    ],
)
def test_a_dead_or_stopped_rank_ends_the_run_and_is_named(
    impatient: CommandLine, number: signal.Signals, happened: str
) -> None:
    with running(impatient, *impatient.recipe("run", *REPLICATED, **ENDLESS), fresh=True) as process:
        assert wait_until(lambda: saved(impatient, "run"), process, STARTING)
        lost = rank_processes(process)[1]
        os.kill(lost, number)
        stderr = ended(process)
    line = told(stderr)
    assert re.search(rf"rank 1 on \S+ \(process {lost}\) {happened}, last seen in (the start|.*step \d+)", line)
    assert "resume from the last checkpoint: `thrifty resume`" in line
    assert "[rank0]" not in stderr and "RuntimeError" not in stderr
    assert "exitcode  : 1 " in stderr and "exitcode  : -9 " in stderr
    summary = RunFolder(impatient.run("run")).read_json("summary")
    assert summary["status"] == "stopped" and summary["exit_code"] == 1
    assert [notice["text"] in line for notice in impatient.records("run", "notice")] == [True]


@pytest.mark.slow
def test_a_rank_in_an_endless_loop_is_named_with_its_line(troubled: CommandLine) -> None:
    with running(troubled, *troubled.recipe("run", *REPLICATED, "--with", "trouble", **ENDLESS)) as process:
        assert wait_until(lambda: made(troubled, "run"), process, STARTING)
        line = told(ended(process))
    assert re.search(
        r"rank 1 on \S+ \(process \d+\) hangs in step 7: no progress for 1\d s, at mine/trouble.py:\d+ in", line
    )
    assert "set THRIFTY_HANG" in line
    assert [notice["text"] in line for notice in troubled.records("run", "notice")] == [True]


@pytest.mark.slow
def test_an_error_on_one_rank_is_printed_by_that_rank_only(troubled: CommandLine) -> None:
    words = troubled.recipe("run", *REPLICATED, "--with", "trouble:kind=error", **ENDLESS)
    with running(troubled, *words, fresh=True) as process:
        stderr = ended(process, STARTING)
    line = told(stderr)
    assert re.search(r"rank 1 on \S+ \(process \d+\) failed in step 7: ValueError: a fault of the model", line)
    assert stderr.count("[rank1]: Traceback") == 1 and "[rank0]" not in stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("words", "changed", "fault"),
    [(("--with", "optimizers.lyon"), {}, "optimizers.lion"), (REPLICATED, {"data__batch": 7}, "data.batch=8")],
    ids=["before the ranks meet", "after"],
)
def test_a_usage_error_is_printed_once(
    thrifty: CommandLine, words: tuple[str, ...], changed: dict[str, int], fault: str
) -> None:
    with running(thrifty, *thrifty.recipe("run", *words, **changed)) as process:
        stderr = ended(process, STARTING)
    assert fault in told(stderr) and "exitcode  : 2 " in stderr


@pytest.mark.slow
def test_a_restart_does_not_resume_a_run_of_another_job(thrifty: CommandLine) -> None:
    thrifty.train("run", *REPLICATED, ranks=2)
    before = thrifty.records("run")
    with running(thrifty, *thrifty.recipe("run", *REPLICATED, steps=20), restarts=1) as process:
        assert ended(process, STARTING).count("runs/run' exists already") == 2
    assert thrifty.records("run") == before


@pytest.mark.slow
def test_ten_kills_lose_no_step_beyond_the_last_checkpoint(thrifty: CommandLine) -> None:
    """torchrun restarts the ranks each time with the same command; the run ends bit-identical."""
    steps, every, kills, rng = 80, 4, 10, random.Random(0)
    settings = {"steps": steps, "checkpoints__every": every, "evaluation__every": 30}
    with running(thrifty, *thrifty.recipe("killed", "--quiet", *REPLICATED, **settings), restarts=kills) as process:
        for _ in range(kills):
            before = len(saved(thrifty, "killed"))
            assert wait_until(lambda before=before: len(saved(thrifty, "killed")) > before, process, STARTING)
            time.sleep(rng.uniform(0, 0.05))
            os.kill(rank_processes(process)[rng.randrange(2)], signal.SIGKILL)
        stderr = process.communicate(timeout=STARTING)[1]
    assert process.returncode == 0, stderr
    assert stderr.count("thrifty: rank") == kills and f"(restart {kills} of at most {kills})" in stderr
    steps_made = [record["step"] for record in thrifty.records("killed")]
    lost = [before - after + 1 for before, after in pairwise(steps_made) if after <= before]
    assert sorted(set(steps_made)) == list(range(1, steps + 1)) and max(lost, default=0) <= every
    thrifty.train("whole", *REPLICATED, ranks=2, **settings)
    assert_equal(thrifty.tensors("killed"), thrifty.tensors("whole"))
