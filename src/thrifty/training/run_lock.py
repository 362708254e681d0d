"""The lock of a run folder: one process at a time may write the folder.

The operating system holds the lock (`flock`) and releases it when the process ends. The lock file names the owner. If
the owner is dead, the lock is taken over with a notice. A lock file from another machine raises an error, because its
owner cannot be checked. The exception is a lock of the same job.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import NO_ROOM
from thrifty.core.errors import ThriftyError, UsageError
from thrifty.core.file_locks import lock_file
from thrifty.machine.lock_owner import is_alive, read_owner
from thrifty.machine.process_start import process_start


class RunLock:
    """The lock of a run folder, held from creation until `release`. Raise UsageError if another process holds the lock.
    `is_same_job` is True if torchrun restarted this job after the previous owner."""

    def __init__(self, file: Path, is_same_job: bool = False):
        self.file, self.is_same_job = file, is_same_job
        self.notice = ""
        """Notice about an earlier owner or about the file system, or ""."""
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise _unwritable(file, error) from error
        try:
            self._take()
        except OSError as error:
            os.close(self._descriptor)
            raise _unwritable(file, error) from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def _take(self) -> None:
        try:
            if not lock_file(self._descriptor, wait=False):
                self.notice = (
                    f"the file system of {self.file.parent} has no locks: a second start at the same moment would not "
                    "be detected"
                )
        except BlockingIOError as error:
            raise self._in_use_error(self._owner()) from error
        owner = self._owner()
        if owner and (is_alive(owner) if owner["host"] == socket.gethostname() else not self.is_same_job):
            raise self._in_use_error(owner)
        if owner:
            self.notice = f"process {owner['pid']} ended without releasing the lock of this run, which was taken over"
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": process_start(os.getpid())}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(mine).encode(), 0)

    def _owner(self) -> dict[str, Any]:
        return read_owner(os.pread(self._descriptor, 4096, 0))

    def _in_use_error(self, owner: dict[str, Any]) -> UsageError:
        who = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        fix = "wait for the process to end; or choose another --name for this run"
        if owner and owner["host"] != socket.gethostname():
            fix = f"if the process no longer runs there, remove '{self.file}'"
        return UsageError(f"'{self.file.parent}' is in use by {who}", fix)

    @property
    def is_in_place(self) -> bool:
        """True if the locked file is still at its path."""
        locked = os.fstat(self._descriptor)
        try:
            current = os.stat(self.file)
        except OSError:
            return False
        return (current.st_dev, current.st_ino) == (locked.st_dev, locked.st_ino)

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)


def _unwritable(file: Path, error: OSError) -> ThriftyError:
    room = error.errno in NO_ROOM
    fix = "free some space there" if room else "check the folder's permissions; or choose another folder with --runs"
    return ThriftyError(f"'{file}' cannot be written: {error.strerror}", fix=fix)
