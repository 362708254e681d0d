"""A signal ends a run with its state saved and the usual exit code; `resume` ends with the same result."""

import os
import signal
import time
from pathlib import Path

import pytest
from command_line import CommandLine, assert_equal, family, kill, wait_until

STEPS = 120
OFTEN = {"checkpoints__every": 1000, "evaluation__every": 1000}


@pytest.fixture(scope="session")
def whole(common_folder: Path) -> CommandLine:
    thrifty = CommandLine(common_folder)
    thrifty.train("uninterrupted", steps=STEPS, **OFTEN)
    return thrifty


def training(thrifty: CommandLine, name: str, least: int = 3) -> bool:
    """Return True if the run has made some steps."""
    file = thrifty.run(name) / "records.jsonl"
    return file.is_file() and file.read_bytes().count(b"\n") >= least


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_training_saves_for_an_identical_resume(
    thrifty: CommandLine, whole: CommandLine, number: signal.Signals
) -> None:
    process = thrifty.start(*thrifty.recipe("run", steps=STEPS, **OFTEN))
    assert wait_until(lambda: training(thrifty, "run"), process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    saved = len(thrifty.records("run"))
    assert 0 < saved < STEPS and stdout.startswith(f"interrupted after {saved} steps")
    assert "stopping after this step, then saving" in stderr
    assert f"stopped by signal {number.value} at step {saved}, which is saved" in stderr
    assert "resume by: thrifty resume" in stderr and "Traceback" not in stderr
    thrifty("resume", "run")
    assert_equal(thrifty.tensors("run"), whole.tensors("uninterrupted"))
    assert [step["step"] for step in thrifty.records("run")] == list(range(1, STEPS + 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_preparing_data_ends_at_once(
    thrifty: CommandLine, number: signal.Signals, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    text = "".join(path.read_text() for path in sorted((thrifty.folder / "corpus").iterdir()))
    long.write_text("\n\n".join(f"{text}{part}" for part in range(400)))  # tens of seconds of work
    own_cache = CommandLine(thrifty.folder, {"THRIFTY_CACHE": str(tmp_path / "cache")})
    process = own_cache.start(*own_cache.recipe("run", "--data", str(long)))
    assert wait_until(lambda: list((tmp_path / "cache").rglob(".*.lock")), process)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(number)
    began = time.monotonic()
    stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert time.monotonic() - began < 15 and "Traceback" not in stderr
    assert not list((tmp_path / "cache").rglob("*.partial-*"))
    assert own_cache.train("run", steps=2)["status"] == "finished"


@pytest.mark.slow
def test_a_second_signal_ends_at_once(thrifty: CommandLine, whole: CommandLine) -> None:
    process = thrifty.start(*thrifty.recipe("run", "--quiet", steps=STEPS, checkpoints__every=1))
    assert wait_until(lambda: training(thrifty, "run", 8), process)
    process.send_signal(signal.SIGSTOP)  # so that both signals are pending when it continues
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.wait(10) in (130, 143)
    assert (thrifty.run("run") / "summary.json").read_text().count('"running"') == 1
    thrifty("resume", "run")
    assert_equal(thrifty.tensors("run"), whole.tensors("uninterrupted"))


def test_a_signal_to_one_rank_stops_both_at_the_same_step(thrifty: CommandLine) -> None:
    words = thrifty.recipe("run", "--with", "parallelism.replicate", steps=4000, **OFTEN)
    process = thrifty.start(*words, ranks=2)
    assert wait_until(lambda: training(thrifty, "run"), process)
    ranks = [member.pid for member in family(process) if member.pid != process.pid]
    assert len(ranks) == 2
    os.kill(max(ranks), signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=60)
    kill(process)
    assert process.returncode != 0 and "exitcode  : 143" in stderr
    saved = len(thrifty.records("run"))
    assert stdout.startswith(f"interrupted after {saved} steps") and "lost contact" not in stderr
    assert (thrifty.run("run") / "checkpoints" / f"step-{saved:08d}" / "manifest.json").is_file()
