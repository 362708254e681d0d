"""Watcher of a folder of runs. It has summaries of all runs, and indexed records of the few open runs."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock

from thrifty.dashboard.run_index import RunIndex
from thrifty.dashboard.run_listing import RunListing, entries
from thrifty.dashboard.run_summary import RunListRow, RunSummary

MOST_INDEXES = 8
"""Maximum number of runs with records in memory. A hundred thousand steps take about 10 MB."""


class RunWatcher:
    """Thread-safe access to a folder of runs."""

    def __init__(self, runs: Path):
        self.runs = runs
        self._summaries: dict[str, RunSummary] = {}
        self._indexes: OrderedDict[str, tuple[RunIndex, Lock]] = OrderedDict()
        self._summarizing, self._opening = Lock(), Lock()

    def entries(self) -> list[RunListing]:
        return entries(self.runs)

    def find(self, name: str) -> RunListing | None:
        """Return the listed folder called `name`, or None."""
        return next((entry for entry in self.entries() if entry.name == name), None)

    def rows(self) -> list[RunListRow]:
        """Return the rows of all runs."""
        with self._summarizing:
            present = {entry.name: entry for entry in self.entries() if entry.kind == "run"}
            self._summaries = {name: summary for name, summary in self._summaries.items() if name in present}
            return [replace(self._summary(entry).refresh(), group=entry.group) for entry in present.values()]

    def row(self, entry: RunListing) -> RunListRow:
        with self._summarizing:
            return self._summary(entry).refresh()

    def _summary(self, entry: RunListing) -> RunSummary:
        return self._summaries.setdefault(entry.name, RunSummary(entry.name, entry.path))

    @contextmanager
    def index(self, entry: RunListing, seconds: float) -> Iterator[RunIndex]:
        """Yield the index of a run, locked for this thread, after reading records for at most about `seconds`
        seconds.
        """
        with self._opening:
            index, lock = self._indexes.setdefault(entry.name, (RunIndex(entry.path), Lock()))
            self._indexes.move_to_end(entry.name)
            while len(self._indexes) > MOST_INDEXES:
                self._indexes.popitem(last=False)
        with lock:
            index.advance(seconds)
            yield index
