"""Reader of Debian packages, which are `ar` archives with a tarball of the files."""

import io
import tarfile
from pathlib import Path

MAGIC = b"!<arch>\n"
HEADER = 60
"""Header size of a member in bytes. The name is in bytes 0 to 15; the size, as text, is in bytes 48 to 57."""
FILES = "data.tar.xz"


def open_package(path: Path) -> tarfile.TarFile:
    """Return the tarball of a package's files. Raises tarfile.ReadError if the tarball is missing or truncated."""
    return tarfile.open(fileobj=io.BytesIO(ar_member(path.read_bytes(), FILES)), mode="r:xz")


def ar_member(content: bytes, member: str) -> bytes:
    """Return a member of an `ar` archive. Members begin at even offsets.

    Raises tarfile.ReadError if the member is missing or truncated.
    """
    offset = len(MAGIC)
    while content.startswith(MAGIC) and offset + HEADER <= len(content):
        name, size = content[offset : offset + 16].decode("ascii", "replace"), content[offset + 48 : offset + 58]
        if not size.strip().isdigit():
            break
        start = offset + HEADER
        stop = start + int(size)
        if name.rstrip(" /") == member and stop <= len(content):
            return content[start:stop]
        offset = stop + stop % 2
    raise tarfile.ReadError(f"{member} is missing or truncated")
