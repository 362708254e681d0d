"""CPU seconds that each folder of tests took, next to its budget; printed by runs of several workers."""

import tomllib
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

BUDGETS: dict[str, float] = tomllib.loads((Path(__file__).parents[1] / "cpu_budgets.toml").read_text())["seconds"]
COLLECTION = "collection"
SMALLEST_SHARE = 0.02
"""Folders below this share of a run are never marked."""


def measure_folders(config: pytest.Config) -> None:
    """Measure in a worker of pytest-xdist, and report in the process that started the workers."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(FolderClock())
    elif config.getoption("numprocesses", None):
        config.pluginmanager.register(BudgetReport())


class FolderClock:
    """CPU seconds of a worker and the processes that it started, folder by folder."""

    def __init__(self) -> None:
        self.seconds, self.folder, self.start = Counter[str](), COLLECTION, 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if (folder := nodeid.split("::")[0].split("/")[1]) != self.folder:
            self.close_folder()
            self.folder = folder

    def close_folder(self) -> None:
        now = family_seconds()
        self.seconds[self.folder] += now - self.start
        self.start = now

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.close_folder()
        session.config.workeroutput["cpu_seconds"] = dict(self.seconds)  # type: ignore[attr-defined]


class BudgetReport:
    """The sum over all workers, printed at the end."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds of each folder and of its budget")
        for line in budget_lines(self.seconds, BUDGETS):
            terminalreporter.write_line(line)


def family_seconds() -> float:
    """Return user and system seconds of this process and of all that it started, ended ones included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def budget_lines(seconds: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """Return a line for each folder, longest first, and one for all.

    Shares of the folders that ran are compared, since processors differ in speed: one that grew by half is marked.
    """
    total, budget_total = sum(seconds.values()), sum(budgets.get(folder, 0.0) for folder in seconds) or 1.0
    rows = [(folder, seconds[folder], budgets.get(folder, 0.0)) for folder in seconds]
    rows.sort(key=lambda row: -row[1])
    lines = []
    for folder, taken, budget in [*rows, ("all", total, budget_total)]:
        share, planned = taken / total, budget / budget_total
        mark = "  <- more than its share" if share > max(1.5 * planned, SMALLEST_SHARE) else ""
        lines.append(f"{folder:<22} {taken:7.0f} of {budget:5.0f}   {share:4.0%} of {planned:4.0%}{mark}")
    return lines
