"""The files of a Debian package, read as a stream: it is an `ar` archive that holds a tarball of them."""

import io
import tarfile
from pathlib import Path

MAGIC = b"!<arch>\n"
HEADER = 60
"""Bytes before each member: its name in the first 16, its size as text in the last 12 but two."""
FILES = "data.tar.xz"


def open_package(path: Path) -> tarfile.TarFile:
    """The tarball of a package's files. Raises tarfile.ReadError where there is no whole one."""
    return tarfile.open(fileobj=io.BytesIO(ar_member(path.read_bytes(), FILES)), mode="r:xz")


def ar_member(content: bytes, wanted: str) -> bytes:
    """A member of an `ar` archive, in which each begins at an even place. Raises tarfile.ReadError where none is
    whole."""
    place = len(MAGIC)
    while content.startswith(MAGIC) and place + HEADER <= len(content):
        name, size = content[place : place + 16].decode("ascii", "replace"), content[place + 48 : place + 58]
        if not size.strip().isdigit():
            break
        start = place + HEADER
        stop = start + int(size)
        if name.rstrip(" /") == wanted and stop <= len(content):
            return content[start:stop]
        place = stop + stop % 2
    raise tarfile.ReadError(f"there is no whole {wanted} in it")
