"""Two ranks compute the single-process run: same examples, same losses, one output."""

from pathlib import Path

import pytest
from command_line import CommandLine, assert_same_curve, kill, wait_until

STEPS = 20
TECHNIQUES = ("parallelism.replicate", "parallelism.shard")


@pytest.fixture(scope="session")
def single(common_folder: Path) -> list[dict]:
    """Return the records of the run in one process."""
    thrifty = CommandLine(common_folder)
    thrifty.train("single", steps=STEPS)
    return thrifty.records("single")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_two_ranks_match_one_process_and_resume_as_one(
    thrifty: CommandLine, single: list[dict], technique: str
) -> None:
    words = thrifty.recipe("run", "--with", technique, steps=STEPS, evaluation__every=8)
    done = thrifty(*words, ranks=2)
    assert_same_curve(thrifty.records("run"), single)
    assert [step["step"] for step in thrifty.records("run")] == list(range(1, STEPS + 1))
    assert done.stdout.count("finished after") == 1 and done.stdout.count("run folder") == 1
    assert sum(" left · step 1/" in line for line in done.stderr.splitlines()) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("technique", "first", "then"),
    [("parallelism.shard", 2, 1), ("parallelism.replicate", 2, 0), ("parallelism.replicate", 0, 2)],
)
def test_a_checkpoint_resumes_on_another_number_of_ranks(
    thrifty: CommandLine, single: list[dict], technique: str, first: int, then: int
) -> None:
    words = thrifty.recipe("run", "--with", technique, steps=STEPS, checkpoints__every=7)
    process = thrifty.start(*words, ranks=first)
    assert wait_until(lambda: (thrifty.run("run") / "checkpoints" / "step-00000007").is_dir(), process)
    kill(process)
    thrifty("resume", "run", ranks=then)
    latest = {step["step"]: step for step in thrifty.records("run")}
    assert_same_curve([latest[step] for step in sorted(latest)], single)


@pytest.mark.slow
def test_an_indivisible_batch_is_refused_with_the_nearest(thrifty: CommandLine) -> None:
    words = thrifty.recipe("run", "--with", "parallelism.replicate", data__batch=7)
    done = thrifty(*words, ranks=2, exit_code=1)
    assert "7 examples cannot be divided equally among 2 ranks" in done.stderr and "data.batch=8" in done.stderr
