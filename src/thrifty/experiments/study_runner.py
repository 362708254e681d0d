"""Study runner. It measures missing cells, saves the result after each cell, and writes the table and the page at the
end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.experiments.study import Study
from thrifty.experiments.study_page import write_page
from thrifty.experiments.study_result import StudyCell, StudyResult, read_result
from thrifty.experiments.study_table import shown, table
from thrifty.experiments.study_workers import CellResult, CellTask, measure_all
from thrifty.machine.cpu_features import usable_cores
from thrifty.reporting.number_format import duration
from thrifty.training.run_environment import environment
from thrifty.training.run_folder import RunFolder

FILE = "study.json"


def run_study(
    study: Study,
    folder: Path,
    *,
    only: Sequence[str] = (),
    jobs: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> StudyResult:
    """Run a study in a folder, which then contains study.json, table.md, plots/ and report.html.

    An interrupted study resumes. `only` selects cases whose labels contain one of its words. `jobs` is the number of
    processes, by default one per core. Raises UsageError if the folder holds other content, or if no cell is
    left to measure.
    """
    result = StudyResult(study, environment("cpu"))
    with _open_study(folder, result) as run:
        tasks = _missing_cells(result, _selected_labels(study, only))
        if not tasks:
            raise UsageError(
                f"'{folder}' is finished: no cell is left", fix="choose another --name; or use more --seeds"
            )
        if result.cells:
            say(f"resuming {folder}: {len(result.cells)} cells measured, {len(tasks)} to measure")
        progress = _Progress(len(tasks))
        with closing(measure_all(tasks, jobs or len(usable_cores()))) as answers:
            for answer in answers:
                result.cells[answer.task.case, answer.task.seed] = StudyCell(answer.numbers, answer.seconds)
                run.write_json("study", result.as_data())
                say(progress.after(answer))
        write_outcome(result, folder)
    return result


def write_outcome(result: StudyResult, folder: Path) -> None:
    """Write table.md and report.html into the folder of study.json."""
    RunFolder(folder).write_text("table.md", table(result))
    write_page(result, folder)


def read_folder(study: Study, folder: Path) -> StudyResult | None:
    """Return the result that a study's folder contains so far, or None if it contains none."""
    if not (folder / FILE).is_file():
        return None
    result = StudyResult(study, environment("cpu"))
    result.take_over(read_result(folder / FILE))
    return result


def is_measured(result: StudyResult, only: Sequence[str] = ()) -> bool:
    """Return True if all cells of the cases that `only` selects are measured."""
    return not _missing_cells(result, _selected_labels(result.study, only))


@contextmanager
def _open_study(folder: Path, result: StudyResult) -> Iterator[RunFolder]:
    there = (folder / FILE).is_file()
    with RunFolder(folder).lock() if there else RunFolder.create(folder) as run:
        if there:
            result.take_over(read_result(folder / FILE))
        yield run


def _selected_labels(study: Study, only: Sequence[str]) -> list[str]:
    for word in only:
        if not any(word in label for label in study.cases):
            raise UsageError(f"{study.name} has no case {word!r}", fix=did_you_mean(word, study.cases))
    return [label for label in study.cases if not only or any(word in label for word in only)]


def _missing_cells(result: StudyResult, labels: Sequence[str]) -> list[CellTask]:
    """Return the missing cells, seed by seed, so that the first results cover all cases."""
    study = result.study
    return [
        CellTask(study.measured_by, label, study.cases[label], seed)
        for seed in range(study.seeds)
        for label in labels
        if (label, seed) not in result.cells
    ]


class _Progress:
    """Progress messages, one after each cell."""

    def __init__(self, total: int):
        self.total, self.done, self.began = total, 0, time.monotonic()

    def after(self, answer: CellResult) -> str:
        self.done += 1
        left = (time.monotonic() - self.began) / self.done * (self.total - self.done)
        numbers = ", ".join(f"{name} {shown(value)}" for name, value in answer.numbers.items())
        return (
            f"[{self.done}/{self.total}] {answer.task.case}, seed {answer.task.seed}: {numbers}"
            f" ({duration(answer.seconds)}; about {duration(left)} left)"
        )
