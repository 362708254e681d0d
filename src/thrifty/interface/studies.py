"""`study`: repeat a published experiment at small scale, and check its expectations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from thrifty.core.errors import UsageError
from thrifty.core.file_names import check_name
from thrifty.core.old_names import rename_cases
from thrifty.experiments import saved_study, studies
from thrifty.experiments.study_charts import titled_chart
from thrifty.experiments.study_result import StudyResult, read_result
from thrifty.experiments.study_runner import FILE, is_measured, read_folder, run_study, write_outcome
from thrifty.experiments.study_table import table
from thrifty.interface.progress import progress
from thrifty.reporting.measured_result import MeasuredResult, Rows, flat
from thrifty.reporting.printed_result import lines


@dataclass(frozen=True, repr=False)
class MeasuredStudy(MeasuredResult):
    """Result of a study, its page, and deviations from a saved result."""

    result: StudyResult
    folder: Path
    compared: int = 0
    """Number of values that were compared with the saved result."""
    off: tuple[str, ...] = ()
    """Values outside the interval of the saved result, one sentence each."""

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 1 if self.off else 0

    @property
    def page(self) -> Path:
        """HTML page of the study."""
        return self.folder / "report.html"

    def as_dict(self) -> dict[str, Any]:
        return self.result.as_data()

    def rows(self) -> Rows:
        cases = self.result.study.cases
        return [
            {"case": case, "seed": seed, **flat(cases[case]), **cell.numbers, "run_seconds": cell.seconds}
            for (case, seed), cell in self.result.cells.items()
        ]

    def charts(self) -> dict[str, Mapping[str, Any]]:
        """Return each plot of the study by its id."""
        return {plot.id: titled_chart(self.result, plot) for plot in self.result.study.plots if self.result.cells}

    def __rich__(self) -> RenderableType:
        return lines(table(self.result), str(self.folder / "report.html"))


def open_study(folder: Path) -> MeasuredStudy:
    """Write the page of a study's folder again, and return the result. The cases are those of the folder, and the plots
    and expectations are those of the installed study.
    """
    result = study_result(read_result(folder / FILE))
    write_outcome(result, folder)
    return MeasuredStudy(result, folder)


def study_result(data: Mapping[str, Any]) -> StudyResult:
    """Return the result of a study from the content of study.json."""
    cases = rename_cases(data["definition"]["cases"])
    seeds = max((cell["seed"] for cell in data["cells"]), default=0) + 1
    result = StudyResult(replace(studies.make(data["study"]), cases=cases, seeds=seeds), data["environment"])
    result.add_saved(data)
    return result


def study(
    study: str,
    *,
    name: str | None = None,
    settings: Sequence[str] = (),
    seeds: int | None = None,
    cases: Sequence[str] = (),
    jobs: int | None = None,
    runs: str | Path = "runs",
    save_result: str | Path | None = None,
    baseline_result: str | Path | None = None,
    quiet: bool = False,
) -> MeasuredStudy:
    """Run a study by name (`thrifty.list("studies")`). The result is a table, plots, and a verdict on each expectation.

    Args:
        name: Folder name under `runs`.
        settings: Changed settings of the study, as in "steps=100".
        cases: Words; only cases whose label contains one of these words are measured.
        jobs: Number of parallel processes.
        save_result: Path of a .json file for the result.
        baseline_result: Path of a saved result to compare with.

    The same call resumes an interrupted study. Raises UsageError if the study or a setting is unknown.

    Example::

        print(thrifty.study("flip", seeds=1))
    """
    made = studies.make(study, tuple(settings))
    made = replace(made, seeds=seeds) if seeds else made
    if save_result and cases:
        raise UsageError(
            "--save-result requires a whole study, but --cases measures a part",
            fix="remove --cases or --save-result",
        )
    if save_result:
        saved_study.refuse_existing_study(Path(save_result))
    baseline = read_result(Path(baseline_result)) if baseline_result else None
    folder, only = Path(runs) / check_name(name or study, "--name"), tuple(cases)
    result = read_folder(made, folder)
    # a finished study is not measured again, but can still be saved or compared
    if result is None or not is_measured(result, only) or not (save_result or baseline):
        result = run_study(made, folder, only=only, jobs=jobs, say=progress(quiet))
    if save_result:
        saved_study.save_study(result, Path(save_result))
    if baseline is None:
        return MeasuredStudy(result, folder)
    comparison = saved_study.compare_with_saved(result, baseline)
    return MeasuredStudy(result, folder, comparison.compared, tuple(comparison.off))
