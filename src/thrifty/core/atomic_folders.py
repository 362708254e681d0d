"""Atomic folders: a folder appears under its name complete or not at all, even if the writing process is killed."""

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
    """Yield a temporary folder to write into. If the block succeeds, the temporary folder is renamed to `folder`;
    otherwise it is deleted. The writing process locks the temporary folder, so that a later call can delete the remains
    of a killed process. Raise OSError if writing fails, or if `folder` exists at the rename and is not
    empty."""
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
            if lock_file(descriptor, wait=False):  # without locks, another process may still write into it
                shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Flush a file or folder to the disk, so that a crash cannot keep the rename but lose the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
