"""The cache folder: fetched sets and prepared tokens. A folder in it is either whole or absent, whoever was killed.

A folder is built aside, flushed, and then takes its name by a rename. A lock per name lets one process build while the
others wait to use the result; it is released by the operating system when its holder dies.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.file_locks import lock_file

FULL = (errno.ENOSPC, errno.EDQUOT)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the right to build `folder`, waiting for another process that has it.

    Raises UsageError where the cache cannot be written to.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
    except OSError as error:
        raise UsageError(
            f"cannot write to the cache folder {folder.parent}: {error.strerror}",
            fix="set the environment variable THRIFTY_CACHE to a folder of your own",
        ) from None
    with file:
        lock_file(file.fileno())  # without locks several may build it: each aside, and all the same
        yield


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """A new folder that takes the name `folder` when the block ends well, and vanishes when it does not.

    Call it under `locked(folder)`. An existing `folder` is replaced.
    """
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(leftover)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        aside.mkdir()
        yield aside
        for path in aside.iterdir():
            _flush(path)
        _take_name(aside, folder)
    except OSError as error:
        if error.errno in FULL:
            raise ThriftyError(
                f"the disk is full while writing {folder}",
                fix="free some space, or set THRIFTY_CACHE to a folder on a larger disk",
            ) from error
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _take_name(aside: Path, folder: Path) -> None:
    if folder.exists():
        old = aside.with_suffix(".old.part")
        folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old)
    else:
        aside.rename(folder)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    """Force a file or folder to the disk, so that the rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
