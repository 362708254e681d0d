"""Folders that appear under their name whole or not at all, whoever was killed while writing one."""

import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thrifty.core.file_locks import lock_file


@contextmanager
def write_aside(folder: Path) -> Iterator[Path]:
    """Make a new folder to write into, which takes the name `folder` when the block ends well and vanishes otherwise.

    Its writer holds a lock on it, so that the next one removes what a killed process left. Raises OSError, also if
    something else than an empty folder has the name by then.
    """
    _remove_leftovers(folder)
    aside = _aside(folder)
    try:
        aside.mkdir()
        with _opened(aside) as descriptor:
            lock_file(descriptor)
            yield aside
            for path in aside.iterdir():
                _flush(path)
            _flush(aside)
            aside.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Do as `write_aside`; a `folder` that exists is replaced."""
    old = _aside(folder)
    try:
        with write_aside(folder) as aside:
            yield aside
            if folder.exists():
                folder.rename(old)
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial-{secrets.token_hex(6)}")


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{glob.escape(folder.name)}.partial-*"):
        with suppress(OSError), _opened(leftover) as descriptor:
            if lock_file(descriptor, wait=False):  # else the file system has no locks, and it may still be written
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Force a file or folder to the disk, so that the rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
