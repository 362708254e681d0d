"""Rows, CSV files and figures of runs, comparisons, studies and sweeps, in Python and by `thrifty report`."""

import csv
from pathlib import Path
from typing import Any

import pytest
import tiny_studies
import user_work
from click.testing import CliRunner

import thrifty
from thrifty.cli.report import command
from thrifty.core.errors import UsageError
from thrifty.experiments import studies
from thrifty.experiments.study_runner import run_study
from thrifty.reporting.measured_result import MeasuredResult

STARTS = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<svg"}
OWN: Any = {"batch": 16, "quiet": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run, comparison, sweep and study; the study is registered while it is opened."""
    runs = tmp_path_factory.mktemp("runs")
    own = {**OWN, **user_work.objects(), "runs": runs, "loss": lambda model, batch: user_work.loss(model, batch)}
    thrifty.train(budget=6, name="run", settings={"evaluation.every": 3, "evaluation.at_start": True}, **own)
    protocol: Any = {"seeds": 1, "rate_trials": 1, "equal_budget": "steps", "warmup_steps": 2}
    thrifty.compare(variants={"small": ["data.batch=8"]}, budget=4, name="comparison", **protocol, **own)
    thrifty.sweep(over={"data.batch": [4, 8]}, reduction=2, budget=4, name="sweep", **own)
    run_study(tiny_studies.levels(seeds=2), runs / "study")
    return runs


def opened(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> MeasuredResult:
    monkeypatch.setattr(studies, "make", lambda name: tiny_studies.levels(seeds=1))
    return thrifty.report(folder / name)


SIZES = {"run": 7, "comparison": 2, "sweep": 3, "study": 2 * len(tiny_studies.levels().cases)}
COLUMNS = {
    "run": {"step", "loss", "learning_rate", "held_out_loss", "held_out_accuracy"},
    "comparison": {"run", "variant", "seed", "held_out_loss", "measured.accuracy", "peak_memory"},
    "sweep": {"trial", "data.batch", "fraction", "judged"},
    "study": {"case", "seed", "run_seconds"},
}


@pytest.mark.parametrize("name", SIZES)
def test_every_result_has_rows_a_csv_file_and_a_page(
    folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = opened(folder, name, monkeypatch)
    frame = result.records()
    assert len(frame) == SIZES[name] and COLUMNS[name] <= {*frame.columns}
    with result.to_csv(tmp_path / "values.csv").open() as text:
        rows = [*csv.DictReader(text)]
    assert [*rows[0]] == [*frame.columns] and len(rows) == SIZES[name]
    assert not any(isinstance(value, list | dict) for row in result.rows() for value in row.values())
    assert "<svg" in result.page.read_text() or "data:image" in result.page.read_text()


@pytest.mark.parametrize("ending", STARTS)
@pytest.mark.parametrize("name", SIZES)
def test_every_result_has_figures_in_the_formats_of_papers(
    folder: Path, tmp_path: Path, name: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = opened(folder, name, monkeypatch)
    for chart in result.charts():
        content = result.figure(chart).save(tmp_path / f"{chart}{ending}").read_bytes()
        assert content.startswith(STARTS[ending]) and b"var(--" not in content
    assert result.figure().spec == result.figure(next(iter(result.charts()))).spec
    with pytest.raises(UsageError, match="there is no chart 'lost'"):
        result.figure("lost")


def test_held_out_columns_have_values_at_evaluations(folder: Path) -> None:
    frame = thrifty.report(folder / "run").records()
    assert frame["held_out_loss"].notna().tolist() == [True, False, False, True, False, False, True]
    assert frame["step"].tolist() == [*range(7)] and frame["loss"].isna().tolist() == [True] + [False] * 6


def test_report_writes_values_and_charts_and_overwrites_nothing(folder: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("values.csv", "loss.pdf", "memory.svg")}
    words = ["--csv", files["values.csv"], "--figure", files["loss.pdf"], "--figure", f"memory={files['memory.svg']}"]
    done = CliRunner().invoke(command, [str(folder / "run"), *map(str, words)])
    assert done.exit_code == 0 and all(file.stat().st_size for file in files.values())
    again = CliRunner().invoke(command, [str(folder / "comparison"), *map(str, words)])
    assert isinstance(again.exception, UsageError) and "exists already" in str(again.exception)
