"""The one door to the disk: everything a save changes in the file system passes through a method of `AtomicFiles`.

Each primitive is one change that can fail or be the last thing a process does, so a test overrides them, counts them
and stops the world at every single one. What is written is on the disk, not only in the page cache, once the file
(`write_file`) and the folder that names it (`sync_folder`) have been flushed.
"""

import errno
import hashlib
import os
import secrets
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from thrifty.core.errors import UsageError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers that mean: the disk, the quota or the limit on file sizes is used up."""

_CHUNK = 16 << 20


@dataclass(frozen=True)
class FileDigest:
    """What a file must hold: its length in bytes and the sha256 of its content in hexadecimal."""

    bytes: int
    sha256: str


class AtomicFiles:
    """The real disk. The first group of methods are the primitives; the second is built on them alone."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create_file(self, path: Path) -> int:
        """A new file; what lies there under its name, a link above all, is neither opened nor followed."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # macOS keeps fsync'ed data in the drive's cache
        else:
            os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; a file at `target` is replaced."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def free_bytes(self, folder: Path) -> int:
        """What a user may still write where `folder` is, or will be."""
        while not folder.exists():
            folder = folder.parent
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
        """Writes and flushes one file; its name is safe only after `sync_folder(path.parent)`."""
        length, digest = 0, hashlib.sha256()
        descriptor = self.create_file(path)
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                digest.update(view)
                length += len(view)
                while view:
                    view = view[self.write(descriptor, view[:_CHUNK]) :]
            self.sync(descriptor)
        finally:
            os.close(descriptor)
        return FileDigest(length, digest.hexdigest())

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.sync(descriptor)
        finally:
            os.close(descriptor)

    def make_folders(self, path: Path) -> None:
        """`path` and its missing parents, each flushed into the folder above it."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        self.make_folder(path)
        self.sync_folder(path.parent)

    def swap(self, path: Path, content: bytes) -> FileDigest:
        """Replaces a file as a whole: a reader, or the next start, sees the old content or the new one."""
        aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")  # which nobody can put there before
        try:
            written = self.write_file(aside, [content])
            self.rename(aside, path)
        except OSError as error:
            with suppress(OSError):
                self.remove_file(aside)
            error.filename = str(path)  # which a failed write does not say, and an own name says nothing to a user
            raise
        self.sync_folder(path.parent)
        return written

    def swap_text(self, path: Path, text: str) -> None:
        self.swap(path, text.encode())

    def remove_tree(self, path: Path) -> None:
        """Removes a folder and what is in it; a link is removed, not followed."""
        if path.is_symlink():
            self.remove_file(path)
            return
        for entry in sorted(path.iterdir()):
            if entry.is_dir() and not entry.is_symlink():
                self.remove_tree(entry)
            else:
                self.remove_file(entry)
        self.remove_folder(path)


def refuse_links(*folders: Path) -> None:
    """Raises UsageError if one of these, or an entry directly in one, is a symbolic link, which would lead reads and
    writes out of a run folder, or a pipe or device, at which they would wait forever."""
    for path in (path for folder in folders for path in (folder, *folder.glob("*"))):
        if path.is_symlink():
            what = f"{path} is a symbolic link, and nothing outside a run folder is read or written"
            raise UsageError(what, fix="remove the link, or put a copy of what it names in its place")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path} is a pipe or a device, not a regular file", fix=f"rm {shlex.quote(str(path))}")
