"""The manifest of a checkpoint: length and sha256 of each file, and a sha256 of this list."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import FileDigest
from thrifty.core.errors import IntegrityError, ThriftyError

FORMAT = 1
"""Version of the checkpoint format. Increase the version if the meaning of the files changes. Checkpoints of older
versions stay readable."""
MANIFEST = "manifest.json"
_MOST_BYTES = 16 << 20


class NewerFormatError(ThriftyError):
    """Error for a checkpoint that a newer version of Thrifty wrote. The checkpoint is not moved to quarantine."""


def manifest_text(step: int, ranks: int, files: dict[str, FileDigest]) -> str:
    listed = {name: {"bytes": written.bytes, "sha256": written.sha256} for name, written in files.items()}
    return _sealed({"format": FORMAT, "step": step, "ranks": ranks, "files": listed})


def verify(folder: Path) -> int:
    """Read every byte of a checkpoint and return its step. Raise IntegrityError for a missing, extra, shortened or
    changed file, or a changed manifest. Raise NewerFormatError for an unknown, newer format."""
    if is_newer(folder):
        raise NewerFormatError(
            f"'{folder}' was written by a newer version of thrifty, in a format that this version does not know",
            fix="update Thrifty: git pull in its clone, or install the newer package",
        )
    manifest = _read(folder / MANIFEST)
    try:
        step, files = int(manifest["step"]), manifest["files"]
        expected = {name: FileDigest(int(each["bytes"]), str(each["sha256"])) for name, each in files.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise IntegrityError(f"{MANIFEST} does not list the files of a checkpoint") from None
    if folder.name.split(".")[0] != f"step-{step:08d}":
        raise IntegrityError(f"the manifest is of step {step}")
    present = {entry.name: entry for entry in os.scandir(folder) if entry.name != MANIFEST}
    for name in sorted(present.keys() | expected.keys()):
        if name not in expected:
            raise IntegrityError(f"{name} does not belong to the checkpoint")
        if name not in present or not present[name].is_file(follow_symlinks=False):
            raise IntegrityError(f"{name} is missing")
        _compare(folder / name, expected[name])
    return step


def is_newer(folder: Path) -> bool:
    """Return True if a newer version of Thrifty wrote the checkpoint."""
    with suppress(IntegrityError):
        form = _read(folder / MANIFEST).get("format")
        return isinstance(form, int) and form > FORMAT
    return False


def _compare(file: Path, expected: FileDigest) -> None:
    with file.open("rb") as content:
        length = os.fstat(content.fileno()).st_size
        if length != expected.bytes:
            raise IntegrityError(f"{file.name} has {length} bytes instead of {expected.bytes}")
        if hashlib.file_digest(content, "sha256").hexdigest() != expected.sha256:
            raise IntegrityError(f"the content of {file.name} has changed")


def _sealed(facts: dict[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True)
    return json.dumps(facts | {"seal": hashlib.sha256(text.encode()).hexdigest()}, sort_keys=True, indent=1)


def _read(file: Path) -> dict[str, Any]:
    if file.is_symlink() or not file.is_file():
        raise IntegrityError(f"{file.name} is missing")
    try:
        with file.open("rb") as content:
            text = content.read(_MOST_BYTES).decode()
        facts = json.loads(text)
        unchanged = text == _sealed({key: value for key, value in facts.items() if key != "seal"})
    except (ValueError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"{file.name} is not readable") from error
    if not unchanged:
        raise IntegrityError(f"{file.name} was changed")
    return facts
