"""Readers of text files, one document at a time. Errors contain the file and line."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

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


def looks_binary(path: Path) -> bool:
    """Return True if the first bytes of a file contain a NUL byte (git's rule for binary files)."""
    with open_data_file(path) as file:
        return b"\0" in file.read(BINARY_PROBE)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file with their numbers from 1, without line ends.

    Raises UsageError for a NUL byte, for bytes that are not UTF-8, and for a line longer than LONGEST_LINE.
    """
    with open_data_file(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            if b"\0" in raw:
                raise UsageError(
                    f"{path}, line {number}: binary data, not text", fix="set data.source to a file of UTF-8 text"
                )
            if len(raw) == LONGEST_LINE:
                limit = f"a line of more than {LONGEST_LINE >> 20} MB"
                raise UsageError(f"{path}, line {number}: {limit}", fix="split the line")
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path}, line {number}: byte 0x{raw[error.start]:02x} is not UTF-8 text",
                    fix=f"save it as UTF-8, for example: iconv -f LATIN1 -t UTF-8 {path.name} > utf8-{path.name}",
                ) from None
            yield number, text.rstrip("\r\n")


def whole_text(path: Path) -> Iterator[str]:
    """Return the file as one document, or nothing if it has only white space."""
    return joined(line for _, line in lines(path))


def text_passages(path: Path) -> Iterator[str]:
    """Return the passages of a file (see `passages`)."""
    return passages(line for _, line in lines(path))


def json_lines(path: Path, column: str) -> Iterator[str]:
    """Return the text in `column` of each line of a .jsonl file. Skip null and blank texts.

    Raises UsageError for a line that is not a JSON object, lacks the column, or has another type in the column.
    """
    return row_texts(json_rows(path), column)


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON objects of a .jsonl file, each with its position for messages. Skip blank lines.

    Raises UsageError for any other line.
    """
    for number, line in lines(path):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json_object(line, where)


def parquet_rows(path: Path, column: str) -> Iterator[str]:
    """Yield the text in `column` of each row of a .parquet file. Skip null and blank texts.

    Raises UsageError if pyarrow is not installed, the file is damaged, or the column is missing or not text.
    """
    with open_parquet(path) as file:
        schema, types = file.schema_arrow, arrow_for(path).types
        check_column(column, schema.names, str(path))
        kind = schema.field(column).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise UsageError(
                f"{path}: column {column!r} holds {kind}, not text", fix="set data.column to a column of text"
            )
        for rows in file.iter_batches(batch_size=1024, columns=[column]):
            yield from (text for text in rows.column(0).to_pylist() if text and text.strip())


def arrow_for(path: Path) -> ModuleType:
    """Return the package pyarrow. Raises UsageError that names `path` if pyarrow is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            f"reading {path} requires pyarrow, which is not installed", fix="pip install 'thrifty[parquet]'"
        ) from None
    return pyarrow


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Yield an open .parquet file. Raises UsageError if pyarrow is not installed or the file is damaged."""
    arrow = arrow_for(path)
    from pyarrow import parquet

    try:
        with open_data_file(path) as content, parquet.ParquetFile(content, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise UsageError(f"{path}: several columns are called {repeated!r}", fix="rename one of the columns")
            yield file
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:  # a damaged page is an OSError
        raise UsageError(
            f"{str(path)!r} is not a readable Parquet file: {str(error).splitlines()[0]}", fix="write the file again"
        ) from None


def check_column(column: str, columns: list[str], where: str) -> None:
    if column not in columns:
        raise UsageError(
            f"{where}: no column {column!r}; there are: {', '.join(sorted(columns)) or 'none'}",
            fix="set data.column to the column of texts",
        )


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers too long for Python
        raise UsageError(f"{where}: not valid JSON ({error})", fix="write one JSON object per line") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a JSON {type(row).__name__}, not an object", fix='write {"text": "..."} per line')
    return row


def row_texts(rows: Iterable[tuple[str, Mapping[str, Any]]], column: str) -> Iterator[str]:
    """Return the text in a column of each row. Skip null and blank texts. Rows are (position, row)."""
    texts = (row_text(row, column, where) for where, row in rows)
    return (text for text in texts if text.strip())


def row_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return the text in a column of a row, or "" for null. Raises UsageError if the column is missing or not text."""
    check_column(column, list(row), where)
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UsageError(
            f"{where}: column {column!r} holds {type(text).__name__}, not text",
            fix="set data.column to a column of text",
        )
    check_characters(text, f"{where}: column {column!r}")
    return text


def check_characters(text: str, what: str) -> None:
    """Raise UsageError for half of a surrogate pair. JSON can represent it, but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} holds half of a surrogate pair", fix="remove that character") from None
