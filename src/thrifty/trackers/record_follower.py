"""From the records of a run to a tracker: each once, also over several starts and while the run goes on."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.secret_redaction import redact_text
from thrifty.machine.lock_owner import lock_owner
from thrifty.reporting.file_tail import FileTail
from thrifty.reporting.run_record import RunRecord, mapping, number, parse_record, read_run
from thrifty.reporting.run_tables import settings
from thrifty.trackers.tracker import TrackedRun, Tracker, open_tracker

EVERY = 1.0
"""Seconds between two looks at a run that goes on."""
SUMMARY = ("status", "steps", "tokens", "held_out_loss", "best_held_out_loss", "peak_memory", "predicted_memory")
PREFIX = {"step": "train", "evaluation": "held_out"}


@dataclass(frozen=True)
class WriteReport:
    """What one call wrote."""

    records: int
    folder: Path
    again: bool
    """Whether an earlier call was gone on with."""


@dataclass(frozen=True)
class _Position:
    """How far the records of a run were passed on."""

    offset: int = 0
    id: str = ""
    started: str = ""
    """When the run was, by which it is told from another of its name."""
    step: int = -1


def track(run: Path, kind: str, out: Path, *, follow: bool = False, online: bool = False) -> WriteReport:
    """Writes what is new of a run's records as a tracker's own files into `out`/`kind`, and with `follow` whatever is
    added, until nobody trains the run any more.

    How far it came is kept beside those files, so that another call goes on from there. Raises UsageError where the
    folder is not a run's, the tracker's package is missing or `out` holds another run of that name, IntegrityError
    where what was kept is damaged.
    """
    record = read_run(run, records=())
    folder = out / kind
    place = folder / f"{record.name}.position.json"
    kept = _kept(place)
    started = str(record.environment.get("started", ""))
    tail = FileTail(record.folder / "records.jsonl", kept.offset)
    if kept.id and (kept.started != started or tail.size < kept.offset):
        raise UsageError(f"{folder} holds another run that was called {record.name}", fix="give another --out")
    tracker = open_tracker(kind, folder, _tracked(record, kept), online)
    passing = _RecordForwarder(tracker, _seconds(started), kept.step)
    try:
        for lines in _new_lines(tail, record.folder, follow):
            for line in lines:
                passing.take(line)
    finally:
        # what was passed on is written down by the tracker before it counts as done
        summary = _summary(run)
        tracker.finish({name: summary[name] for name in SUMMARY if summary.get(name) is not None})
        position = _Position(tail.offset, tracker.id, started, passing.step)
        AtomicFiles().swap_text(place, json.dumps(asdict(position)) + "\n")
    return WriteReport(passing.records, folder, bool(kept.id))


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by the names that trackers show: train/loss, held_out/accuracy, notes/noise_scale."""
    prefix = PREFIX.get(str(record.get("kind")))
    if prefix is None:
        return {}
    values = {f"{prefix}/{name}": value for name, value in record.items() if name != "step"}
    values |= {f"notes/{name}": value for name, value in mapping(record.get("notes")).items()}
    return {name: value for name, each in values.items() if (value := number(each)) is not None}


def _new_lines(tail: FileTail, run: Path, follow: bool) -> Iterator[list[bytes]]:
    while True:
        running = follow and bool(lock_owner(run / "lock"))  # before the reading, so that its last records are read too
        while lines := tail.read():
            yield lines
        if not running:
            return
        time.sleep(EVERY)


class _RecordForwarder:
    """Passes records on."""

    def __init__(self, tracker: Tracker, started: float, step: int):
        self.tracker, self.moment, self.started, self.step = tracker, started, started, step
        self.records = 0

    def take(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            return
        self.records += 1
        step = int(record["step"])
        # an evaluation has no time of its own: it follows its step
        self.moment = self.started + seconds if (seconds := number(record.get("seconds"))) is not None else self.moment
        if values := scalars(record):
            self.tracker.log(step, values, self.moment)
            self.step = step
        elif record["kind"] in ("notice", "change"):
            text = record.get("text") or f"{record.get('technique')}: {record.get('reason')}"
            self.tracker.note(step, redact_text(str(text)))


def _tracked(record: RunRecord, kept: _Position) -> TrackedRun:
    about = str(record.recipe.get("about", ""))
    values = {path: value for path, value, _ in settings(record).rows}
    return TrackedRun(record.name, about, values, record.recipe_text, kept.id, kept.step)


def _summary(run: Path) -> Mapping[str, Any]:
    """As it is at the end; nothing where the run was removed meanwhile."""
    try:
        record = read_run(run, records=())
        return {**record.summary, "status": record.state.name}
    except UsageError:
        return {}


def _seconds(started: str) -> float:
    """Since 1970 until the run was first started, or until now where it does not say."""
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return time.time()


def _kept(place: Path) -> _Position:
    if not place.is_file():
        return _Position()
    try:
        kept = json.loads(place.read_bytes())
        return _Position(int(kept["offset"]), str(kept["id"]), str(kept["started"]), int(kept["step"]))
    except (ValueError, KeyError, TypeError) as error:
        fix = f"remove {place.parent}, and what it holds is written again"
        raise IntegrityError(f"{place} does not say how far the records were read", fix) from error
