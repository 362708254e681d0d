"""Readers of text files, one document at a time. Errors contain the file and line."""

import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from thrifty.core.errors import UsageError
from thrifty.data.text.passage_split import joined, passages

BINARY_PROBE = 8192
LONGEST_LINE = 1 << 28
"""Maximum size of a line in bytes. A whole line is kept in memory."""


def open_data_file(path: Path) -> BinaryIO:
    """Return an open file. Raises UsageError for a broken link, and for a pipe or device, which may never end."""
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "is not a file, or is a broken link"
        raise UsageError(f"{path} {what}", fix="remove it from the folder; or set data.source to a regular file")
    return path.open("rb")


def foreign_content(path: Path) -> str:
    """Return "UTF-16 text" or "binary data" if a file begins so, otherwise "". A NUL byte means binary, as in git."""
    with open_data_file(path) as file:
        return _foreign(file.read(BINARY_PROBE))


def _foreign(start: bytes) -> str:
    if start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        return "UTF-16 text"
    return "binary data" if b"\0" in start else ""


def lines(path: Path, ends: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers from 1, with line ends only if `ends` is set.

    Raises UsageError for a NUL byte, for bytes that are not UTF-8, and for a line longer than LONGEST_LINE.
    """
    with open_data_file(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            if content := _foreign(raw):
                raise UsageError(
                    f"{path}, line {number}: {content}, not UTF-8 text",
                    fix=_convert(path, "UTF-16") if "UTF-16" in content else "set data.source to a file of UTF-8 text",
                )
            if len(raw) == LONGEST_LINE:
                limit = f"a line of more than {LONGEST_LINE >> 20} MB"
                raise UsageError(f"{path}, line {number}: {limit}", fix="split the line")
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8 text",
                    fix=f"save it as UTF-8, for example: {_convert(path, 'CP1252')}",
                ) from None
            yield number, text if ends else text.rstrip("\r\n")


def _convert(path: Path, encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(f'utf8-{path.name}')}"


def whole_text(path: Path) -> Iterator[str]:
    """Return the file as one document, or nothing if it has only white space."""
    return joined(line for _, line in lines(path))


def text_passages(path: Path) -> Iterator[str]:
    """Return the passages of a file (see `passages`)."""
    return passages(line for _, line in lines(path))


def check_characters(text: str, what: str) -> None:
    """Raise UsageError for half of a surrogate pair. JSON can represent it, but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} holds half of a surrogate pair", fix="remove that character") from None
