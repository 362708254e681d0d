"""A pipeline as a user starts it: two processes, one model, one output; then resumed in a single process."""

import pytest
from command_line import CommandLine, assert_same_curve, kill, wait_until

STEPS = 12


@pytest.mark.slow
def test_a_pipeline_of_two_processes_resumes_in_one(thrifty: CommandLine) -> None:
    thrifty.train("single", steps=STEPS)
    words = thrifty.recipe("run", "--mesh", "pipeline=2", steps=STEPS, checkpoints__every=5, evaluation__every=4)
    process = thrifty.start(*words, ranks=2)
    assert wait_until(lambda: (thrifty.run("run") / "checkpoints" / "step-00000005").is_dir(), process, seconds=180)
    kill(process)
    thrifty("resume", "run", "--mesh", "pipeline=1")
    latest = {step["step"]: step for step in thrifty.records("run")}
    assert_same_curve([latest[step] for step in sorted(latest)], thrifty.records("single"))
