"""`report`: write the page of a run, comparison, study, sweep or lottery, and return its measured values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, overload

from thrifty.interface.comparisons import open_comparison
from thrifty.interface.lotteries import open_lottery
from thrifty.interface.run_reports import RunReport, report_run
from thrifty.interface.studies import open_study
from thrifty.interface.sweeps import open_sweep
from thrifty.interface.training import RunResult
from thrifty.reporting.measured_result import MeasuredResult

OPENERS: dict[str, Callable[[Path], MeasuredResult]] = {
    "comparison.json": open_comparison,
    "lottery.json": open_lottery,
    "study.json": open_study,
    "sweep.json": open_sweep,
}
"""Functions that open a result folder, by the file that identifies the folder."""


@overload
def report(run: RunResult) -> RunReport: ...
@overload
def report(run: MeasuredResult | str | Path) -> Any: ...
def report(run: MeasuredResult | RunResult | str | Path) -> MeasuredResult:
    """Write report.html to the folder of a run, comparison, study, sweep or lottery. Return the result.

    `run` is a result, its folder, or its name under ./runs. It may be unfinished. The returned RunReport,
    ComparisonResult, MeasuredStudy, SweepResult or LotteryResult has `page`, `records()` (a DataFrame),
    `to_csv(file)`, and `figure(name).save(file)` for .png, .svg and .pdf.

    Raises UsageError if there is no such run, comparison, study, sweep or lottery.

    Example::

        thrifty.report("runs/mine").figure("memory").save("memory.pdf")
        thrifty.report("runs/mine").to_csv("mine.csv")
    """
    place = getattr(run, "folder", run)
    for folder in (Path(place), Path("runs") / place) if isinstance(place, str | Path) else ():
        for file, opened in OPENERS.items():
            if (folder / file).is_file():
                return opened(folder)
    return report_run(run)
