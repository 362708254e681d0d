"""Cache of downloaded sets and prepared tokens. A folder of the cache is complete or absent, even after a kill.

One process locks a folder and builds the contents. Other processes wait for the result. If the building process dies,
the operating system releases the lock.
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
    """Hold the lock to build `folder`. Wait first if another process holds the lock.

    Raises UsageError if the cache is not writable.
    """
    lock = folder.with_name(f".{folder.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666), "w")
    except OSError as error:
        raise UsageError(
            f"cannot write to the cache folder {str(folder.parent)!r}: {error.strerror}",
            fix="export THRIFTY_CACHE=FOLDER, with a folder that you can write to",
        ) from None
    with file:
        lock_file(file.fileno())  # on file systems without locks, several processes may build equal folders
        yield


@contextmanager
def build_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder. It replaces `folder` if the block succeeds; otherwise it is removed.

    Call it under `lock_folder(folder)`. Raises ThriftyError if the disk is full.
    """
    try:
        with replace_folder(folder) as temporary:
            yield temporary
    except OSError as error:
        if error.errno in NO_ROOM:
            raise ThriftyError(
                f"the disk is full while writing {str(folder)!r}",
                fix="free disk space; or set THRIFTY_CACHE to a folder on a larger disk",
            ) from error
        raise
