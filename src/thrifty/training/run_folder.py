"""The folder of one run, the only place where training writes.

Every file stays readable after a crash at any moment. Small JSON files are replaced atomically. Only the last line of
the records can be incomplete. For checkpoints see `checkpoint.py`.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from thrifty.core.atomic_files import NO_ROOM, AtomicFiles, refuse_links
from thrifty.core.errors import IntegrityError, ThriftyError, UsageError, did_you_mean, spelled
from thrifty.core.secret_redaction import redact
from thrifty.training.checkpoint_index import checkpoints, remove_leftovers
from thrifty.training.run_lock import RunLock

Record = Mapping[str, Any]


class RunFolder:
    """The folder `runs/<name>/`. `RunFolder(path)` reads nothing. After `create` or `lock`, only this process may write
    the folder.

        with RunFolder.create(path) as run: ...          a new run
        with RunFolder.open(path).lock() as run: ...     an existing run, to resume

    `agents` are the torchrun processes that started the ranks, if any. An agent outlives its ranks. If two starts have
    the same agent, the second start is a restart of the same job.
    """

    def __init__(self, path: Path):
        self.path = path
        self.again = False
        """True if this is a restart of the job that last locked the folder."""
        self._lock: RunLock | None = None
        self._records: int | None = None
        self._written = hashlib.sha256()
        """Hash of all records in the file."""

    @classmethod
    def create(cls, path: Path, agents: Collection[str] = ()) -> "RunFolder":
        """Create and lock a run folder. Raise UsageError if the folder contains files of another job, or if another
        process has locked the folder."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UsageError(f"'{path}' is a file, not a run folder", "choose another --name") from error
        run = cls(path)
        if not run._is_of(agents):
            _refuse_full(path)  # before the lock, which would leave a file in a folder that is not ours
        run.lock(agents)
        try:
            if not run.again:
                _refuse_full(path)
        except UsageError:
            run.close()
            raise
        return run

    @classmethod
    def create_numbered(cls, path: Path, agents: Collection[str] = ()) -> "RunFolder":
        """Create and lock the first free folder of NAME, NAME-2, NAME-3 and so on. A restart of a job finds the job's
        folder."""
        for number in count(1):
            numbered = path if number == 1 else path.with_name(f"{path.name}-{number}")
            try:
                return cls.create(numbered, agents)
            except UsageError:  # the folder contains another run, or another process uses it
                if not numbered.exists():
                    raise
        raise AssertionError

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return an existing run, not locked. Raise UsageError if the run does not exist."""
        run = cls(path)
        if not run.recipe.is_file() and not checkpoints(run.checkpoints):
            runs = [recipe.parent.name for recipe in path.parent.glob("*/recipe.toml")]
            fix = did_you_mean(path.name, runs) if runs else "start one with `thrifty train`"
            raise UsageError(f"there is no run in '{path}'", fix)
        return run

    def lock(self, agents: Collection[str] = ()) -> "RunFolder":
        """Lock the folder and return it; `notice` reports a lock that was taken over. Raise UsageError if another
        process has locked the run, or if the folder contains a link."""
        refuse_links(self.path.resolve(), self.checkpoints)
        if self._lock is None:
            self.again = self._is_of(agents)
            self._lock = RunLock(self.path / "lock", is_same_job=self.again)
            self.remove_leftovers()
            if agents:
                self.write_json("job", sorted(agents))
        return self

    def remove_leftovers(self) -> None:
        """Remove incomplete files and folders of interrupted writes and removals."""
        files = AtomicFiles()
        with suppress(OSError):  # a file that cannot be removed now is removed at the next start
            for path in self.path.glob(".*.partial"):
                files.remove_file(path)
            remove_leftovers(self.checkpoints, files)

    def _is_of(self, agents: Collection[str]) -> bool:
        with suppress(IntegrityError, TypeError):  # other content names no agent
            return not set(agents).isdisjoint(self.read_json("job"))
        return False

    @property
    def notice(self) -> str:
        """Notice about a lock that was taken over, or ""."""
        return self._lock.notice if self._lock else ""

    def close(self) -> None:
        if self._records is not None:
            os.close(self._records)
            self._records = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._remove_if_empty()
        self.close()

    def _remove_if_empty(self) -> None:
        """Remove the folder if it has only this process's lock, after a start that was refused."""
        with suppress(OSError):  # a folder that cannot be removed may stay
            if self._lock is not None and [entry.name for entry in self.path.iterdir()] == ["lock"]:
                AtomicFiles().remove_file(self.path / "lock")
                AtomicFiles().remove_folder(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def records(self) -> Path:
        return self.path / "records.jsonl"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def refuse_moved(self) -> None:
        """Raise ThriftyError if the locked folder is no longer at its path. This prevents writes to another folder."""
        if self._lock is not None and not self._lock.is_in_place:
            raise ThriftyError(
                f"'{self.path}' was moved or deleted during the run; the run stops",
                fix="move or restore the folder, then `thrifty resume`: the run continues from its newest checkpoint",
            )

    def append(self, record: Record) -> None:
        """Append a record as one line, visible to readers at once. Secrets are removed; non-finite values become
        null."""
        self.refuse_moved()
        line = json.dumps(_finite(redact(record)), allow_nan=False).encode() + b"\n"
        if self._records is None:
            self._records, content = _opened_at_whole_lines(self.records)
            self._written = hashlib.sha256(content)
        descriptor = self._records
        before = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(descriptor, before)
            room = error.errno in NO_ROOM
            fix = "free some space there, then `thrifty resume`" if room else "repair the disk, then `thrifty resume`"
            raise ThriftyError(f"'{self.records}' cannot be written: {error.strerror}", fix) from error
        self._written.update(line)

    def seal_records(self) -> dict[str, Any]:
        """Flush all records to the disk and return their length and hash."""
        assert self._records is not None
        AtomicFiles().sync(self._records)
        return {"bytes": os.fstat(self._records).st_size, "sha256": self._written.hexdigest()}

    def damage_of_records(self, seal: Mapping[str, Any]) -> list[str]:
        """Return a notice if the records changed after `seal_records` returned `seal`."""
        content = self.records.read_bytes() if self.records.is_file() else b""
        if hashlib.sha256(content[: seal["bytes"]]).hexdigest() == seal["sha256"]:
            return []
        how = "has been cut" if len(content) < seal["bytes"] else "has been changed"
        return [
            f"'{self.records}' {how} since the checkpoint: curves and evaluations of earlier steps are missing or "
            "wrong in it and cannot be recovered; the run itself continues from its checkpoint unchanged"
        ]

    def read_records(self) -> list[dict[str, Any]]:
        """Return all records, oldest first. Raise IntegrityError for a damaged line. Skip a line that a crash cut. If a
        step was repeated after a resume, return only its last record. A step may have several changes and notices;
        those with different texts are all returned."""
        records: dict[Any, dict[str, Any]] = {}
        content = self.records.read_bytes() if self.records.is_file() else b""
        for number, line in enumerate(content.split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
                identity = (record["kind"], record["step"], record.get("technique"), record.get("text"))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                what = f"line {number} of '{self.records}' is damaged"
                raise IntegrityError(what, f"remove line {number}, which only the report requires") from error
            records.pop(identity, None)
            records[identity] = record
        return list(records.values())

    def read_later_records(self, step: int) -> list[dict[str, Any]]:
        """Return the records from `step` on, oldest first. Skip damaged lines, which a resumed run does not require."""
        records = []
        for line in self.records.read_bytes().splitlines() if self.records.is_file() else ():
            with suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                if record["step"] >= step:
                    records.append(record)
        return records

    def write_json(self, name: str, value: Any) -> None:
        """Replace `<name>.json` atomically, without secrets. `name` is, for example, "environment" or "summary"."""
        self.write_text(f"{name}.json", json.dumps(_finite(redact(value)), indent=1, allow_nan=False) + "\n")

    def write_text(self, file: str, text: str) -> None:
        """Replace a file atomically, unless the file has this text already."""
        self.refuse_moved()
        try:
            if (self.path / file).is_file() and (self.path / file).read_bytes() == text.encode():
                return
            AtomicFiles().swap_text(self.path / file, text)
        except OSError as error:
            fix = "free some space there" if error.errno in NO_ROOM else "check the folder's permissions"
            raise ThriftyError(f"'{self.path / file}' cannot be written: {error.strerror}", fix) from error

    def read_json(self, name: str) -> Any:
        """Return the content of `<name>.json`. Raise IntegrityError if the file is missing or not JSON."""
        try:
            return json.loads((self.path / f"{name}.json").read_bytes())
        except FileNotFoundError as error:
            raise IntegrityError(f"'{self.path}' has no {name}.json", "pass the folder of a run") from error
        except (ValueError, RecursionError) as error:
            what = f"'{self.path / name}.json' is damaged: {error}"
            raise IntegrityError(what, "restore it from a backup") from error


def _refuse_full(path: Path) -> None:
    # an interrupted start leaves its lock, the identity of its job, and at most one unfinished file
    if any(entry.name not in ("lock", "job.json") and not entry.name.endswith(".partial") for entry in path.iterdir()):
        fix = spelled(
            "choose another --name for the new run; or `thrifty resume` the existing run",
            f"pass another name=…; or thrifty.resume({str(path)!r}, …)",
        )
        raise UsageError(f"the run folder '{path}' exists already", fix)


def _opened_at_whole_lines(file: Path) -> tuple[int, bytes]:
    """Open a file for appending and remove an incomplete last line. Return the file descriptor and the content."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    os.ftruncate(descriptor, len(whole))
    return descriptor, whole


def _finite(value: Any) -> Any:
    """Return a value with non-finite floats replaced by None, because JSON has no nan and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
