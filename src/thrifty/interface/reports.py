"""`report`: write the page of a run, comparison, study, sweep or lottery, and return its measured values."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from thrifty.interface.run_reports import RunReport, report_run
from thrifty.reporting.measured_result import MeasuredResult

if TYPE_CHECKING:
    from thrifty.interface.training import RunResult

OPENERS = {
    "comparison.json": "comparisons:open_comparison",
    "lottery.json": "lotteries:open_lottery",
    "study.json": "studies:open_study",
    "sweep.json": "sweeps:open_sweep",
}
"""Functions that open a result folder, by the file that identifies the folder. They import torch, which the report of a
run does not need."""


@overload
def report(run: "RunResult") -> RunReport: ...
@overload
def report(run: MeasuredResult | str | Path) -> Any: ...
def report(run: "MeasuredResult | RunResult | str | Path") -> MeasuredResult:
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
        for file, opener in OPENERS.items():
            if (folder / file).is_file():
                module, _, function = opener.partition(":")
                return getattr(import_module(f"thrifty.interface.{module}"), function)(folder)
    return report_run(run)
