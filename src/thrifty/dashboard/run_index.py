"""The records of one run, read once and then only where they were added to."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.reporting.file_tail import FileTail
from thrifty.reporting.key_figures import KeyFigures, key_figures
from thrifty.reporting.run_curves import EVALUATION_FIELDS, NOTED, STEP_FIELDS, Curve, RunCurves, noise_scale_of
from thrifty.reporting.run_record import EVENTS, RunRecord, number, parse_record, read_run

MEASURES = 16
"""Measured beside the held-out loss, at most."""
MOST_EVENTS = 20_000
SMALL_FILES = ("recipe.toml", "origins.json", "environment.json", "explanation.json", "summary.json")


class RunIndex:
    """What the page of a run needs of its records. Not for several threads at once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tail = FileTail(folder / "records.jsonl")
        self._is_whole = False
        self._forget()

    def _forget(self) -> None:
        self.steps = RunCurves([*STEP_FIELDS, NOTED, "skipped", "tokens", "seconds"])
        self.evaluations = RunCurves(EVALUATION_FIELDS)
        self.events: dict[tuple[str, float, str, str], Mapping[str, Any]] = {}
        self.unreadable = 0
        self._restarts = self.tail.restarts

    def advance(self, seconds: float) -> None:
        """Reads what was added, for about so many seconds at most."""
        end = time.monotonic() + seconds
        self._is_whole = False
        while not self._is_whole:
            lines = self.tail.read()
            if self.tail.restarts != self._restarts:
                self._forget()
            for line in lines:
                self._take(line)
            self._is_whole = not lines
            if time.monotonic() > end:
                break

    @property
    def share(self) -> float:
        """Of the records, how much has been read; 1 only when all whole lines have been."""
        return 1.0 if self._is_whole else min(self.tail.offset / max(1, self.tail.size), 0.999)

    @property
    def version(self) -> str:
        """Changes when anything of the run that a page shows does."""
        files = [self.tail.offset, self.tail.restarts]
        for name in SMALL_FILES:
            try:
                files.append((self.folder / name).stat().st_mtime_ns)
            except OSError:
                files.append(0)
        return "-".join(map(str, files))

    def record(self) -> RunRecord:
        """The run with only the last of its steps, the last with a finite loss, and of its evaluations the best too."""
        rows = [*_telling_rows(self.steps, "step"), *_telling_rows(self.evaluations, "evaluation")]
        record = read_run(self.folder, [*rows, *sorted(self.events.values(), key=lambda event: event["step"])])
        return replace(record, damage=(*record.damage, *self._damage()))

    def key_figures(self, record: RunRecord) -> KeyFigures:
        """As of all records."""
        key = key_figures(record)
        skipped = int(self.steps.curve("skipped").values.sum())
        summary_counts = record.summary and record.last_step <= (number(record.summary.get("steps")) or 0)
        return replace(
            key,
            skipped_steps=key.skipped_steps if summary_counts else skipped,
            tokens_per_second=_median(self.steps.curve("tokens_per_second")),
            flops_per_second=_median(self.steps.curve("flops_per_second")),
            noise_scale=_last(self.steps.curve(NOTED)),
        )

    def _take(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            self.unreadable += bool(line.strip())
            return
        step, kind = int(record["step"]), record["kind"]
        if kind == "step":
            skipped = int(record.get("skipped") is True)
            self.steps.put(step, record | {NOTED: noise_scale_of(record), "skipped": skipped})
        elif kind == "evaluation":
            columns = self.evaluations.columns
            for name, value in record.items():
                if name not in columns and name != "step" and number(value) is not None and len(columns) < MEASURES:
                    self.evaluations.add(name)
            self.evaluations.put(step, record)
        elif kind in EVENTS:
            same = (kind, record["step"], str(record.get("text")), str(record.get("technique")))
            self.events.pop(same, None)
            self.events[same] = record
            if len(self.events) > MOST_EVENTS:
                del self.events[next(iter(self.events))]

    def _damage(self) -> list[str]:
        lost = self.unreadable + self.tail.left_out
        return [f"records.jsonl: {lost} unreadable lines were left out."] if lost else []


def _telling_rows(curves: RunCurves, kind: str) -> list[dict[str, Any]]:
    losses = np.array(curves.columns["loss"])
    finite = np.flatnonzero(np.isfinite(losses))
    places = {len(losses) - 1} if len(losses) else set()
    if len(finite):
        places |= {int(finite[-1]), int(np.nanargmin(losses))}
    return [
        {"kind": kind, "step": curves.steps[place], **{name: column[place] for name, column in curves.columns.items()}}
        for place in sorted(places)
    ]


def _median(curve: Curve) -> float | None:
    return float(np.median(curve.values)) if len(curve) else None


def _last(curve: Curve) -> float | None:
    return float(curve.values[-1]) if len(curve) else None
