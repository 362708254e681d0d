"""Transfer of a run's records to a tracker. Each record is sent once, over several calls and during the run."""

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
"""Seconds between two reads of the records during a run."""
SUMMARY = ("status", "steps", "tokens", "held_out_loss", "best_held_out_loss", "peak_memory", "predicted_memory")
PREFIX = {"step": "train", "evaluation": "held_out"}


@dataclass(frozen=True)
class WriteReport:
    """Result of one call of `track`."""

    records: int
    folder: Path
    again: bool
    """True if the call continued an earlier call."""


@dataclass(frozen=True)
class _Position:
    """Position in a run's records: all earlier records were transferred."""

    offset: int = 0
    id: str = ""
    started: str = ""
    """Start time of the run, which distinguishes it from another run of the same name."""
    step: int = -1


def track(run: Path, kind: str, out: Path, *, follow: bool = False, online: bool = False) -> WriteReport:
    """Write new records of a run as a tracker's own files into `out`/`kind`.

    With `follow`, the call continues with new records until no process trains the run. The position in the records is
    stored next to the files, so that the next call continues at this position. Raises UsageError if the folder does not
    belong to a run, the tracker's package is missing, or `out` has another run of this name. Raises IntegrityError if
    the stored position is damaged.
    """
    record = read_run(run, records=())
    folder = out / kind
    file = folder / f"{record.name}.position.json"
    before = _read_position(file)
    started = str(record.environment.get("started", ""))
    tail = FileTail(record.folder / "records.jsonl", before.offset)
    if before.id and (before.started != started or tail.size < before.offset):
        raise UsageError(
            f"'{folder}' already has another run named {record.name!r}", fix="use another folder: --out NEW"
        )
    tracker = open_tracker(kind, folder, _tracked(record, before), online)
    forwarder = _RecordForwarder(tracker, _seconds(started), before.step)
    try:
        for lines in _new_lines(tail, record.folder, follow):
            for line in lines:
                forwarder.take(line)
    finally:
        # the tracker writes the records before the position counts them as done
        summary = _summary(run)
        tracker.finish({name: summary[name] for name in SUMMARY if summary.get(name) is not None})
        position = _Position(tail.offset, tracker.id, started, forwarder.step)
        AtomicFiles().swap_text(file, json.dumps(asdict(position)) + "\n")
    return WriteReport(forwarder.records, folder, bool(before.id))


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's values under tracker names, such as train/loss, held_out/accuracy, notes/noise_scale."""
    prefix = PREFIX.get(str(record.get("kind")))
    if prefix is None:
        return {}
    values = {f"{prefix}/{name}": value for name, value in record.items() if name != "step"}
    values |= {f"notes/{name}": value for name, value in mapping(record.get("notes")).items()}
    return {name: value for name, each in values.items() if (value := number(each)) is not None}


def _new_lines(tail: FileTail, run: Path, follow: bool) -> Iterator[list[bytes]]:
    while True:
        running = follow and bool(lock_owner(run / "lock"))  # before the read, so that the last records are read
        while lines := tail.read():
            yield lines
        if not running:
            return
        time.sleep(EVERY)


class _RecordForwarder:
    """Sender of records to a tracker."""

    def __init__(self, tracker: Tracker, started: float, step: int):
        self.tracker, self.moment, self.started, self.step = tracker, started, started, step
        self.records = 0

    def take(self, line: bytes) -> None:
        record = parse_record(line)
        if record is None:
            return
        self.records += 1
        step = int(record["step"])
        # an evaluation has no time of its own and uses the time of its step
        self.moment = self.started + seconds if (seconds := number(record.get("seconds"))) is not None else self.moment
        if values := scalars(record):
            self.tracker.log(step, values, self.moment)
            self.step = step
        elif record["kind"] in ("notice", "change"):
            text = record.get("text") or f"{record.get('technique')}: {record.get('reason')}"
            self.tracker.note(step, redact_text(str(text)))


def _tracked(record: RunRecord, before: _Position) -> TrackedRun:
    about = str(record.recipe.get("about", ""))
    values = {path: value for path, value, _ in settings(record).rows}
    return TrackedRun(record.name, about, values, record.recipe_text, before.id, before.step)


def _summary(run: Path) -> Mapping[str, Any]:
    """Return the run's present summary; {} if the run was deleted."""
    try:
        record = read_run(run, records=())
        return {**record.summary, "status": record.state.name}
    except UsageError:
        return {}


def _seconds(started: str) -> float:
    """Return the run's first start in seconds since 1970. If the start is unknown, return the present time."""
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return time.time()


def _read_position(file: Path) -> _Position:
    if not file.is_file():
        return _Position()
    try:
        position = json.loads(file.read_bytes())
        return _Position(int(position["offset"]), str(position["id"]), str(position["started"]), int(position["step"]))
    except (ValueError, KeyError, TypeError) as error:
        fix = f"remove {file.parent}; its content is then written again"
        raise IntegrityError(f"'{file}' has no valid position in the records", fix) from error
