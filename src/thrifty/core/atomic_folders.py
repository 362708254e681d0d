"""Folders that appear under their name complete or not at all, even if the writing process is killed."""

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
    """Yield a new folder to write into. It is renamed to `folder` if the block succeeds, and deleted otherwise. Its
    writer holds a lock on it, so that the next writer can delete the leftovers of a killed process. Raises OSError,
    also if the name is taken by then, unless by an empty folder."""
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
    """Write a folder as `write_aside` does, and replace an existing `folder`."""
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
            if lock_file(descriptor, wait=False):  # without locks, another process may still be writing it
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename never survives without its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
