"""The progress of a run: start, steps, end."""

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_recipes
from rich.console import Console

from thrifty.interface.run_endings import ending
from thrifty.training import progress_display
from thrifty.training.progress_display import ProgressDisplay, StepProgress, parts
from thrifty.training.trainer import train

PROGRESS = StepProgress(
    7, 9, 0.5, 0.75, 7, 10.0, 0.25, 1e9, 2e9, 65.0, measured={"accuracy": 0.5}, number_format="bfloat16"
)


def test_the_last_line_has_the_final_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tiny_recipes.text(tmp_path)
    summary = train(replace(recipe, evaluation=replace(recipe.evaluation, every=1)), tmp_path)
    lines = [each for each in capsys.readouterr().err.splitlines() if " left · step " in each]
    assert lines[-1].startswith(f"0:00 left · step {summary['steps']}/{summary['steps']} · ")
    assert f" · held-out {summary['held_out_loss']:.3f} · " in lines[-1]


def test_an_evaluation_of_an_earlier_step_names_its_step() -> None:
    assert "held-out 0.750, accuracy 0.5" in parts(PROGRESS)
    assert "held-out 0.750, accuracy 0.5 after step 5" in parts(replace(PROGRESS, evaluated_step=5))


def test_the_time_left_is_unknown_after_a_first_step() -> None:
    assert parts(replace(PROGRESS, seconds_left=None))[0] == "-:-- left"


@pytest.mark.parametrize("width", [20, 40, 100, 200])
def test_progress_line_fits_the_terminal(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, legacy_windows=False)
    console.print(replace(PROGRESS, used=(12.0, 60.0)))
    (text,) = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert len(text) <= width and text.startswith("1:05 left ")
    assert ("step 7/9" in text, "used 12 of 60 s" in text) == (width >= 40, width >= 100)
    assert text.rstrip().endswith("25% of bfloat16 peak") == (width == 200)


def terminal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "100", **environment}.items():
        monkeypatch.setenv(name, value)


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for environment, colors in (({}, True), ({"NO_COLOR": "1"}, False)):
        terminal(monkeypatch, **environment)
        with ProgressDisplay() as display:
            display.started()
            display.update(PROGRESS)
        assert bool(re.search(r"\x1b\[(3|9)\d", capsys.readouterr().err)) == colors


def test_quiet_display_prints_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(monkeypatch)
    with ProgressDisplay(quiet=True) as display:
        display.phase("opening the data")
        display.started()
        display.update(PROGRESS)
    assert capsys.readouterr() == ("", "")


def test_start_names_its_phases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now)
    display = ProgressDisplay()
    for phase, seconds in (("opening the data", 3.0), ("building the model", 0.01), ("making the first step", 30.0)):
        display.phase(phase)
        now += seconds
    display.started()
    assert capsys.readouterr().err == "first step after 33.0 s: opening the data 3.0 s, making the first step 30.0 s\n"


def test_slow_start_shows_each_phase(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(progress_display.time, "monotonic", lambda: now)
    display = ProgressDisplay()
    display.phase("opening the data")
    now += 20
    display.phase("building the model")
    assert capsys.readouterr().err == "building the model …\n"


def test_an_interrupted_run_names_the_step_of_its_evaluation(tmp_path: Path) -> None:
    recipe = tiny_recipes.text(tmp_path)
    recipe = replace(recipe, evaluation=replace(recipe.evaluation, every=2))
    summary = train(recipe, tmp_path, observers=[lambda record: record.step < 3], quiet=True)
    assert summary["steps"] == 3 and summary["evaluated_step"] == 2
    assert any(each.startswith("held-out loss after step 2 ") for each in ending(summary))
    summary["evaluated_step"] = 3
    assert not any("after step" in each for each in ending(summary))
