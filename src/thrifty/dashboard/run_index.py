"""Index of one run's records. It reads only appended lines."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from thrifty.reporting.file_tail import FileTail
from thrifty.reporting.run_curves import RunCurves
from thrifty.reporting.run_record import RunRecord, is_event, parse_record, read_run

MOST_EVENTS = 20_000
SMALL_FILES = ("recipe.toml", "origins.json", "environment.json", "explanation.json", "summary.json")


class RunIndex:
    """Records of a run for its page. Not thread-safe."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tail = FileTail(folder / "records.jsonl")
        self._is_whole = False
        self._forget()

    def _forget(self) -> None:
        self.curves = RunCurves()
        self.events: dict[tuple[str, float, str, str], Mapping[str, Any]] = {}
        self.unreadable = 0
        self._restarts = self.tail.restarts

    def advance(self, seconds: float) -> None:
        """Read appended records for at most about `seconds` seconds."""
        end = time.monotonic() + seconds
        self._is_whole = False
        while not self._is_whole:
            lines = self.tail.read()
            if self.tail.restarts != self._restarts:
                self._forget()
            for line in lines:
                self._add(line)
            self._is_whole = not lines
            if time.monotonic() > end:
                break

    @property
    def share(self) -> float:
        """Fraction of the records that has been read. It is 1 only after all complete lines are read."""
        return 1.0 if self._is_whole else min(self.tail.offset / max(1, self.tail.size), 0.999)

    @property
    def version(self) -> str:
        """Version that changes when any file of the page changes."""
        files = [self.tail.offset, self.tail.restarts]
        for name in SMALL_FILES:
            try:
                files.append((self.folder / name).stat().st_mtime_ns)
            except OSError:
                files.append(0)
        return "-".join(map(str, files))

    def record(self) -> RunRecord:
        """Return the run with all its events but only its last step. `curves` contains the values of all steps."""
        rows = [{"kind": "step", "step": step} for step in self.curves.steps.steps[-1:]]
        record = read_run(self.folder, [*rows, *sorted(self.events.values(), key=lambda event: event["step"])])
        return replace(record, damage=(*record.damage, *self._damage()))

    def _add(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            self.unreadable += bool(line.strip())
            return
        kind = record["kind"]
        if kind in ("step", "evaluation"):
            self.curves.put(record)
        elif is_event(record):
            key = (kind, record["step"], str(record.get("text")), str(record.get("technique")))
            self.events.pop(key, None)
            self.events[key] = record
            if len(self.events) > MOST_EVENTS:
                del self.events[next(iter(self.events))]

    def _damage(self) -> list[str]:
        skipped = self.unreadable + self.tail.left_out
        return [f"records.jsonl: {skipped} unreadable lines were skipped."] if skipped else []
