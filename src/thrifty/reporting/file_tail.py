"""Reading a file that another process appends lines to: each line once, and only what is new."""

import os
import stat
from pathlib import Path

CHUNK = 4 << 20
"""Bytes."""
_MARK = 256


class FileTail:
    """The whole lines of a growing file. A line that is still being written is left for later.

    A file that was cut below what has been read, or replaced by another, is read from its beginning; `restarts` counts
    how often. At most `chunk` bytes are read at once; lines longer than that are left out and counted in `left_out`. A
    first `offset` is where a line begins.
    """

    def __init__(self, file: Path, offset: int = 0, *, chunk: int = CHUNK):
        self.file, self.offset, self.chunk = file, offset, chunk
        self.restarts = self.left_out = 0
        self._mid_line = self._overlong = False
        self._identity: tuple[int, int] | None = None
        self._mark = b""
        """How the file begins, since the number of a removed file is given to new ones."""

    @property
    def size(self) -> int:
        """Bytes of the file now; 0 if there is none."""
        try:
            status = self.file.stat()
        except OSError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def read(self) -> list[bytes]:
        """The next whole lines, without their ends; none if nothing whole was added."""
        if not self.file.is_file():  # a pipe or a device would never end
            return []
        try:
            opened = self.file.open("rb")
        except OSError:
            return []
        with opened:
            self._follow(opened.fileno())
            while True:
                content = os.pread(opened.fileno(), self.chunk, self.offset)
                end = content.rfind(b"\n") + 1
                if not end and len(content) < self.chunk:
                    return []
                self.offset += end or len(content)
                if not end:
                    self.left_out += not self._overlong
                    self._overlong = True
                elif lines := self._lines(content[: end - 1]):
                    return lines

    def skip_to(self, offset: int) -> None:
        """Passes over what comes before, and over the rest of the line that `offset` may lie in."""
        self.offset, self._mid_line = offset, offset > 0

    def _lines(self, content: bytes) -> list[bytes]:
        lines = content.split(b"\n")
        if self._mid_line or self._overlong:  # the rest of a line whose beginning was not taken
            lines = lines[1:]
            self._mid_line = self._overlong = False
        return lines

    def _follow(self, descriptor: int) -> None:
        """Start again where the file is not the one that was read before."""
        status = os.fstat(descriptor)
        identity, mark = (status.st_dev, status.st_ino), os.pread(descriptor, _MARK, 0)
        known = self._identity in (None, identity) and mark.startswith(self._mark)
        is_new = status.st_size < self.offset or not known
        if is_new:
            self.offset, self._mid_line, self._overlong = 0, False, False
            self.restarts += 1
        self._identity, self._mark = identity, mark
