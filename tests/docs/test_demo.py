"""`make demo` trains four programs for the same time, and says in words which was faster."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "demo"))

import demo  # noqa: E402


def programs(*losses: float, seconds: float = 40.0) -> demo.Programs:
    """Return results of a loop, of Trainer and of Thrifty. A curve falls linearly to the loss of its program."""
    return {
        label: {"steps": 100, "first": 1.0, "curve": [(seconds * i / 4, loss + 4 - i) for i in range(5)], "text": ""}
        for label, loss in zip(("PyTorch loop", "Hugging Face Trainer", demo.PLANNED), losses, strict=True)
    }


def test_verdict_is_the_time_to_equal_quality() -> None:
    assert demo.in_words(programs(5.0, 4.0, 3.0)) == (
        "Equal quality 1.3 to 2.0 times as fast: Thrifty reached the final loss of PyTorch loop after 20 s instead of "
        "40 s, of Hugging Face Trainer after 30 s instead of 40 s"
    )
    _, trainer, planned = demo.rows(programs(5.0, 4.0, 3.0))
    assert trainer == ["Hugging Face Trainer", "100", "1.0 s", "4.00", "30 s instead of 40 s: 1.3x"]
    assert planned[-1] == ""


def test_verdict_names_what_was_not_reached() -> None:
    assert demo.in_words(programs(5.0, 2.0, 3.0)).endswith("; it did not reach that of Hugging Face Trainer")
    assert demo.in_words(programs(1.0, 2.0, 3.0)).startswith("Thrifty did not reach the loss of any other program")


def test_only_a_plan_that_beats_every_program_is_shown_as_good() -> None:
    assert demo.is_faster(programs(5.0, 4.0, 3.0))
    assert not demo.is_faster(programs(5.0, 2.0, 3.0)) and not demo.is_faster(programs(3.0, 4.0, 3.0))


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_make_demo_runs_the_demo() -> None:
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES")}
    done = subprocess.run(["make", "-n", "demo", "SECONDS=5"], cwd=REPOSITORY, env=own, capture_output=True, text=True)
    assert done.returncode == 0 and ".venv/bin/python demo/demo.py 5" in done.stdout


@pytest.mark.slow
def test_demo_ends_with_verdict_text_and_page(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    command = [sys.executable, str(REPOSITORY / "demo" / "demo.py"), "4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Equal quality" in done.stdout or "Thrifty did not reach" in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 48 and max(map(len, lines)) <= 100
    page = tmp_path / re.search(r"Page with all curves +(\S+)", done.stdout)[1]  # type: ignore[index]
    assert page.read_text().count("<svg") == 2
