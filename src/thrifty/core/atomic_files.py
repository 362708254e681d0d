"""Atomic file operations. Every change that a save makes to the file system is a method of `AtomicFiles`.

Each primitive makes one change. A primitive can fail, and a process can be killed after it. Tests override the
primitives, count the changes, and stop after each change. `write_file` flushes a file, and `sync_folder` its folder.
After both, written data is on the disk, not only in the page cache.
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

from thrifty.core.errors import InfeasibleError, UsageError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error numbers of a full disk, an exhausted quota, or the limit on file sizes."""

_CHUNK = 16 << 20


def refuse_full_disk(folder: Path, needed: float, what: str, fix: str) -> None:
    """Raise InfeasibleError if fewer than `needed` bytes are free on the disk of a folder. `what` names the use."""
    free = AtomicFiles().free_bytes(folder)
    if needed > free:
        raise InfeasibleError(
            f"{what} of {needed / 1e6:,.0f} MB to {str(folder)!r}, where {free / 1e6:,.0f} MB are free", fix=fix
        )


@dataclass(frozen=True)
class FileDigest:
    """Expected content of a file: its length in bytes and its sha256 in hexadecimal."""

    bytes: int
    sha256: str


class AtomicFiles:
    """File operations on the disk. Methods before `write_file` are primitives. Later methods only use the
    primitives."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create_file(self, path: Path) -> int:
        """Create and open a new file. Raise FileExistsError if the path exists, even as a link."""
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
        """Rename atomically. A file at `target` is replaced."""
        os.replace(source, target)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def free_bytes(self, folder: Path) -> int:
        """Return the bytes that a user may still write in `folder`, or in its nearest existing parent."""
        while not folder.exists():
            folder = folder.parent
        stats = os.statvfs(folder)
        return stats.f_bavail * stats.f_frsize

    def write_file(self, path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
        """Write and flush one file. A crash cannot lose the file's name after `sync_folder(path.parent)`."""
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
        """Create `path` and its missing parents, and flush each parent folder."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        self.make_folder(path)
        self.sync_folder(path.parent)

    def swap(self, path: Path, content: bytes) -> FileDigest:
        """Replace a whole file atomically. Readers see the old or the new content, also after a crash."""
        aside = path.with_name(
            f".{path.name}.{secrets.token_hex(6)}.partial"
        )  # random, so that nobody can create it first
        try:
            written = self.write_file(aside, [content])
            self.rename(aside, path)
        except OSError as error:
            with suppress(OSError):
                self.remove_file(aside)
            error.filename = str(path)  # a failed write names no file, and the temporary name means nothing to a user
            raise
        self.sync_folder(path.parent)
        return written

    def swap_text(self, path: Path, text: str) -> None:
        self.swap(path, text.encode())

    def remove_tree(self, path: Path) -> None:
        """Delete a folder and its contents. A link is deleted, but not followed."""
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
    """Raise UsageError if a folder, or an entry directly in it, is a symbolic link, a pipe or a device. A link would
    lead reads and writes out of a run folder; a pipe or device would block them forever."""
    for path in (path for folder in folders for path in (folder, *folder.glob("*"))):
        if path.is_symlink():
            what = f"'{path}' is a symbolic link, and files outside a run folder are neither read nor written"
            raise UsageError(what, fix="replace the link with a copy of its target")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"'{path}' is a pipe or a device, not a regular file", fix=f"rm {shlex.quote(str(path))}")
