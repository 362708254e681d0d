"""Cache folder of downloaded sets and prepared tokens. A folder in it is complete or absent, even after a kill.

One process holds the lock of a folder and builds it, while others wait for the result. The operating system releases
the lock when its holder dies.
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
    """Hold the lock to build `folder`, after waiting for another process that holds it.

    Raises UsageError if the cache is not writable.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "w")
    except OSError as error:
        raise UsageError(
            f"cannot write to the cache folder {folder.parent}: {error.strerror}",
            fix="export THRIFTY_CACHE=FOLDER, a folder that you can write to",
        ) from None
    with file:
        lock_file(file.fileno())  # on file systems without locks several processes may build equal folders
        yield


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` if the block succeeds, and is removed otherwise.

    Call it under `lock_folder(folder)`. Raises ThriftyError if the disk is full.
    """
    try:
        with replace_folder(folder) as temporary:
            yield temporary
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ThriftyError(
                f"the disk is full while writing {folder}",
                fix="free some space, or set THRIFTY_CACHE to a folder on a larger disk",
            ) from error
        raise
