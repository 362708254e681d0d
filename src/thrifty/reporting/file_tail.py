"""Reader of a file to which another process appends lines. Each line is read once."""

import os
import stat
from pathlib import Path

CHUNK = 4 << 20
"""Maximum number of bytes per read."""
_MARK = 256


class FileTail:
    """Reader of the complete lines of a growing file. An incomplete last line is read later.

    If the file is truncated or replaced, reading restarts at its beginning; `restarts` counts these events. One read
    takes at most `chunk` bytes. Longer lines are skipped and counted in `left_out`. An initial `offset` must be the
    beginning of a line.
    """

    def __init__(self, file: Path, offset: int = 0, *, chunk: int = CHUNK):
        self.file, self.offset, self.chunk = file, offset, chunk
        self.restarts = self.left_out = 0
        self._mid_line = self._overlong = False
        self._identity: tuple[int, int] | None = None
        self._mark = b""
        """First bytes of the file, to detect a new file that has the inode number of a removed file."""

    @property
    def size(self) -> int:
        """Current size of the file in bytes; 0 if there is no file."""
        try:
            status = self.file.stat()
        except OSError:
            return 0
        return status.st_size if stat.S_ISREG(status.st_mode) else 0

    def read(self) -> list[bytes]:
        """Return the next complete lines without line ends; empty if there are no new lines."""
        if not self.file.is_file():  # reading a pipe or a device would never end
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
        """Skip to the end of the line that contains `offset`."""
        self.offset, self._mid_line = offset, offset > 0

    def _lines(self, content: bytes) -> list[bytes]:
        lines = content.split(b"\n")
        if self._mid_line or self._overlong:  # the rest of a line whose beginning was skipped
            lines = lines[1:]
            self._mid_line = self._overlong = False
        return lines

    def _follow(self, descriptor: int) -> None:
        """Restart at the beginning if the file was replaced or truncated."""
        status = os.fstat(descriptor)
        identity, mark = (status.st_dev, status.st_ino), os.pread(descriptor, _MARK, 0)
        known = self._identity in (None, identity) and mark.startswith(self._mark)
        is_new = status.st_size < self.offset or not known
        if is_new:
            self.offset, self._mid_line, self._overlong = 0, False, False
            self.restarts += 1
        self._identity, self._mark = identity, mark
