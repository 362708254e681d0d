"""The cache folder: fetched sets and prepared tokens. A folder in it is either whole or absent, whoever was killed.

A lock per name lets one process build a folder while the others wait to use the result; it is released by the operating
system when its holder dies.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thrifty.core.atomic_files import NO_ROOM
from thrifty.core.atomic_folders import replace_folder
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.file_locks import lock_file


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
        file = os.fdopen(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "w")
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

    Call it under `lock_folder(folder)`. An existing `folder` is replaced.
    """
    try:
        with replace_folder(folder) as aside:
            yield aside
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ThriftyError(
                f"the disk is full while writing {folder}",
                fix="free some space, or set THRIFTY_CACHE to a folder on a larger disk",
            ) from error
        raise
