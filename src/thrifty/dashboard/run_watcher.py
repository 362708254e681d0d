"""The runs that are watched: glances at all of them, and the records of the few that are looked at."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from thrifty.dashboard.run_index import RunIndex
from thrifty.dashboard.run_listing import RunListing, entries
from thrifty.dashboard.run_summary import RunListRow, RunSummary

MOST_INDEXES = 8
"""Runs whose records stay in memory: some 10 MB for a hundred thousand steps."""


class RunWatcher:
    """What several threads ask of a folder of runs."""

    def __init__(self, runs: Path):
        self.runs = runs
        self._glances: dict[str, RunSummary] = {}
        self._indexes: OrderedDict[str, tuple[RunIndex, Lock]] = OrderedDict()
        self._glancing, self._opening = Lock(), Lock()

    def entries(self) -> list[RunListing]:
        return entries(self.runs)

    def find(self, name: str) -> RunListing | None:
        """The entry of this name; None for anything that is not in the list of them."""
        return next((entry for entry in self.entries() if entry.name == name), None)

    def rows(self) -> list[RunListRow]:
        """All runs at a glance."""
        with self._glancing:
            there = {entry.name: entry for entry in self.entries() if entry.kind == "run"}
            self._glances = {name: glance for name, glance in self._glances.items() if name in there}
            return [self._glance(entry).refresh() for entry in there.values()]

    def row(self, entry: RunListing) -> RunListRow:
        with self._glancing:
            return self._glance(entry).refresh()

    def _glance(self, entry: RunListing) -> RunSummary:
        return self._glances.setdefault(entry.name, RunSummary(entry.name, entry.path))

    @contextmanager
    def index(self, entry: RunListing, seconds: float) -> Iterator[RunIndex]:
        """The records of a run, read on for about so many seconds at most, for this thread alone."""
        with self._opening:
            index, lock = self._indexes.setdefault(entry.name, (RunIndex(entry.path), Lock()))
            self._indexes.move_to_end(entry.name)
            while len(self._indexes) > MOST_INDEXES:
                self._indexes.popitem(last=False)
        with lock:
            index.advance(seconds)
            yield index
