"""Study runs with real processes, from the first cell to the page, with kills and resumes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from command_line import family, kill, wait_until
from tiny_studies import dying, failing, levels, noisy

from thrifty.core.errors import IntegrityError, ThriftyError, UsageError
from thrifty.experiments.study import MeasuredQuantity, Study
from thrifty.experiments.study_runner import read_folder, run_study


def begun(folder: Path) -> list[str]:
    """Return the started cells; a cell that started twice is listed twice."""
    lines = (folder.parent / "log").read_text().splitlines()
    return [line.removeprefix("began ") for line in lines if line.startswith("began")]


def cells(folder: Path) -> list[dict]:
    return json.loads((folder / "study.json").read_text())["cells"]


def start(folder: Path, seconds: float = 0.3) -> subprocess.Popen[str]:
    """Start a process that measures twelve cells, two at a time. Each cell takes `seconds`."""
    return subprocess.Popen(
        [sys.executable, "-c", "from tiny_studies import main; main()", folder, "4", str(seconds)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_finished_study_has_cells_table_plots_and_page(tmp_path: Path) -> None:
    said: list[str] = []
    result = run_study(levels(), tmp_path / "levels", jobs=2, say=said.append)
    assert result.finished
    assert len(said) == len(cells(tmp_path / "levels")) == 9
    assert {"study.json", "table.md", "report.html", "plots"} <= {path.name for path in (tmp_path / "levels").iterdir()}
    assert (tmp_path / "levels" / "plots" / "height.png").read_bytes().startswith(b"\x89PNG")


def test_results_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    found = [run_study(levels(), tmp_path / str(jobs), jobs=jobs) for jobs in (1, 3)]
    heights = [{place: numbers["height"] for place, numbers in result.measured.items()} for result in found]
    assert heights[0] == heights[1]


@pytest.mark.slow
def test_a_killed_study_resumes_without_repeating_cells(tmp_path: Path) -> None:
    folder = tmp_path / "levels"
    process = start(folder)
    wait_until(lambda: (folder / "study.json").is_file() and len(cells(folder)) >= 3, process)
    workers = family(process)[1:]
    assert len(workers) == 2
    process.kill()  # only the parent process: its workers must notice
    assert not psutil.wait_procs(workers, timeout=10)[1]
    kill(process)
    kept = cells(folder)
    assert 3 <= len(kept) < 12

    result = run_study(levels(seeds=4, log=str(tmp_path / "log"), seconds=0.3), folder, jobs=2)
    assert result.finished
    assert [cell for cell in cells(folder) if cell in kept] == kept
    for cell in kept:
        level = {"one": 1.0, "two": 2.0, "three": 3.0}[cell["case"]]
        assert begun(folder).count(f"{level} {cell['seed']}") == 1


@pytest.mark.slow
def test_more_seeds_measure_only_new_cells(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    run_study(levels(seeds=1, log=log), tmp_path / "levels", jobs=1)
    run_study(levels(seeds=3, log=log), tmp_path / "levels", jobs=1)
    assert len(begun(tmp_path / "levels")) == len(set(begun(tmp_path / "levels"))) == 9


@pytest.mark.slow
def test_cases_can_be_measured_in_parts(tmp_path: Path) -> None:
    first = run_study(levels(), tmp_path / "levels", only=["tw", "three"], jobs=1)
    assert {label for label, _ in first.cells} == {"two", "three"}
    assert run_study(levels(), tmp_path / "levels", jobs=1).finished
    with pytest.raises(UsageError, match="no case 'fuor'"):
        run_study(levels(), tmp_path / "levels", only=["fuor"])


def test_a_finished_study_is_not_overwritten(tmp_path: Path) -> None:
    run_study(levels(seeds=1), tmp_path / "levels", jobs=1)
    before = (tmp_path / "levels" / "study.json").read_bytes()
    with pytest.raises(UsageError, match="finished"):
        run_study(levels(seeds=1), tmp_path / "levels", jobs=1)
    assert (tmp_path / "levels" / "study.json").read_bytes() == before


def test_another_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("a run")
    with pytest.raises(UsageError, match="exists already"):
        run_study(levels(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"]


def test_cells_of_another_definition_are_refused(tmp_path: Path) -> None:
    run_study(levels(seeds=1), tmp_path / "levels", jobs=1)
    with pytest.raises(UsageError, match="the cases changed"):
        run_study(levels(seeds=2, spread=0.2), tmp_path / "levels")


def test_cells_of_another_machine_are_refused(tmp_path: Path) -> None:
    run_study(levels(seeds=1), tmp_path / "levels", jobs=1)
    file = tmp_path / "levels" / "study.json"
    data = json.loads(file.read_text())
    data["environment"]["torch"] = "1.0"
    file.write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"torch was 1\.0"):
        run_study(levels(seeds=2), tmp_path / "levels")


def test_a_damaged_result_is_reported(tmp_path: Path) -> None:
    run_study(levels(seeds=1), tmp_path / "levels", jobs=1)
    (tmp_path / "levels" / "study.json").write_text("{")
    with pytest.raises(IntegrityError, match="damaged"):
        read_folder(levels(), tmp_path / "levels")


def test_a_failed_cell_is_named_and_the_others_are_saved(tmp_path: Path) -> None:
    study = replace(levels(), measure=failing, derive=None)
    with pytest.raises(ThriftyError, match="case 'two', seed 1: ValueError: no such level"):
        run_study(study, tmp_path / "levels", jobs=1)
    assert [(cell["case"], cell["seed"]) for cell in cells(tmp_path / "levels")] == [
        ("one", 0), ("one", 1), ("two", 0), ("three", 0)
    ]  # fmt: skip


def one_case(measure: object) -> Study:
    return Study(
        name="odd", measure=measure, cases={"only": {}}, quantities={"height": MeasuredQuantity("how high")}, seeds=1
    )  # type: ignore[arg-type]


def test_a_dead_process_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ThriftyError, match="ended with code 3"):
        run_study(one_case(dying), tmp_path / "odd", jobs=1)


def test_printed_output_is_ignored_and_unknown_names_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'width' is not a quantity of the study"):
        run_study(one_case(noisy), tmp_path / "odd", jobs=1)


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_and_saves_the_cells(tmp_path: Path) -> None:
    folder = tmp_path / "levels"
    process = start(folder, seconds=2.0)
    wait_until(lambda: (folder / "study.json").is_file() and cells(folder), process)
    workers, began = family(process)[1:], time.monotonic()
    for member in family(process):  # as a terminal does
        member.send_signal(signal.SIGINT)
    process.wait(timeout=10)
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert time.monotonic() - began < 10
    assert 1 <= len(cells(folder)) < 12
    kill(process)
