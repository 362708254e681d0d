"""`thrifty sweep` in real processes."""

import os
import signal

import pytest
from command_line import CommandLine


@pytest.mark.slow
def test_a_killed_sweep_resumes_from_the_command_line(thrifty: CommandLine) -> None:
    train = thrifty.recipe("s", steps=18)
    words = ["sweep", *train[1:], "--over", "adamw.lr=1e-3..1e-1:log", "--trials", "4", "--reduction", "2"]
    process = thrifty.start(*words)
    while not (thrifty.folder / "runs" / "s" / "trial-1" / "summary.json").is_file():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    found = thrifty.json(*words)
    assert found["status"] == "finished" and [len(trial["rungs"]) for trial in found["trials"]].count(3) == 1
