"""Tables: files of rows with named columns, read one row at a time.

    .jsonl          a JSON object per line
    .json           a list of JSON objects, or a JSON object per line
    .csv            a line of column names, then rows, separated by commas, semicolons, tabs or bars. Quoted values may
                    contain separators and line ends
    .tsv            the same with tabs
    .parquet        requires pyarrow
    .arrow          a file of `save_to_disk` of the package datasets; requires pyarrow

A folder of `save_to_disk` has the .arrow files of each split.
"""

import csv
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from thrifty.core.errors import UsageError
from thrifty.data.text.text_readers import LONGEST_LINE, check_characters, lines, open_data_file

Row = tuple[str, Mapping[str, Any]]
"""Position of a row for messages, and its values by column."""
DECODER, SPACE = json.JSONDecoder(), re.compile(r"\s*")
DELIMITERS = ",;\t|"
CSV_ERRORS = {
    "unexpected end of data": "a quoted value does not end",
    "field larger than field limit": "a quoted value does not end",
    "expected after": "text follows the end of a quoted value",
}
"""Explanation of each error of the module csv."""
SAVE_AGAIN = "write the folder again with `save_to_disk` of the package datasets"
LONGEST_NAME = 40
"""Maximum number of characters of a column name in a fix. A longer name is probably text of a file without heading."""
BATCH = 256
"""Number of rows of a .parquet file that are read at once. Rows may contain images."""


@dataclass
class Table:
    """Rows of a table, which can be read once. `classes` has the class names of each column with class numbers."""

    name: str
    rows: Iterable[Row]
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def is_table(path: Path) -> bool:
    """Return True if the name of a file is the name of a table."""
    return path.suffix.lower() in _READERS


def table_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a table: the file, or the training split of a `save_to_disk` folder. Return () for others."""
    if path.is_dir():
        return saved_splits(path)["train"] if is_saved_dataset(path) else ()
    return (path,) if is_table(path) else ()


def open_table(path: Path, columns: Collection[str] = ()) -> Table:
    """Return the table of a file. Formats that allow it read only `columns`, unless one is missing.

    Raises UsageError, also while rows are read, with the position of what cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in _ARROW:
        return Table(str(path), _READERS[suffix](path))
    with open_arrow(path) as content:
        metadata = (content[0].metadata or {}).get(b"huggingface", b"{}")
    classes = {}
    with suppress(ValueError, AttributeError, KeyError, TypeError):  # metadata of another library
        features = json.loads(metadata)["info"]["features"]
        inner = {column: feature.get("feature", feature) for column, feature in features.items()}
        classes = {column: list(each["names"]) for column, each in inner.items() if "names" in each}
    return Table(str(path), _arrow_rows(path, columns), classes)


def first_row(path: Path) -> Mapping[str, Any]:
    """Return the first row of a table. Return {} if the table is empty or cannot be read."""
    with suppress(UsageError, OSError):
        for file in table_files(path):
            for _, row in open_table(file).rows:
                return row
    return {}


def is_saved_dataset(folder: Path) -> bool:
    """Return True for a folder that `save_to_disk` of the package datasets has written."""
    parts = ("dataset_info.json", "state.json")
    return (folder / "dataset_dict.json").is_file() or all((folder / part).is_file() for part in parts)


def saved_splits(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the .arrow files of each split of a `save_to_disk` folder; a folder without splits is the split train.

    Raises UsageError for a damaged folder, and for a folder without a training split.
    """
    try:
        names = {"train": ""}
        if (listing := folder / "dataset_dict.json").is_file():
            names = {name: name for name in json.loads(listing.read_text(encoding="utf-8"))["splits"]}
        states = {
            name: json.loads((folder / inner / "state.json").read_text(encoding="utf-8"))
            for name, inner in names.items()
        }
        splits = {
            name: tuple(folder / names[name] / file["filename"] for file in state["_data_files"])
            for name, state in states.items()
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"its description is damaged ({type(error).__name__}: {error})") from None
    if absent := next((file for files in splits.values() for file in files if not file.is_file()), None):
        raise _damaged(folder, f"{absent.name} is missing")
    if any(state.get("_indices_files") or state.get("_indices_data_files") for state in states.values()):
        raise _damaged(folder, "it stores a selection of rows by their numbers")
    if "train" not in splits:
        raise UsageError(
            f"{str(folder)!r} has the splits {', '.join(splits)}, but no split called train",
            fix=f"--data {folder / next(iter(splits), '')}",
        )
    return splits


def _damaged(folder: Path, why: str) -> UsageError:
    return UsageError(f"{folder} cannot be read: {why}", fix=SAVE_AGAIN)


def json_rows(path: Path) -> Iterator[Row]:
    """Yield the JSON objects of a .jsonl file. Skip blank lines. Raises UsageError for any other line."""
    for number, line in lines(path):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json_object(line, where)


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also for numbers too long for Python
        raise UsageError(f"{where}: not valid JSON ({error})", fix="write one JSON object per line") from None
    if not isinstance(row, dict):
        raise UsageError(f"{where}: a JSON {type(row).__name__}, not an object", fix='write {"text": "..."} per line')
    return row


def _json_file(path: Path) -> Iterator[Row]:
    """Yield the objects of a .json file. The text of a list is read as a whole, so its size is limited."""
    with open_data_file(path) as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start and not start.startswith(b"["):
        yield from json_rows(path)
        return
    if path.stat().st_size > LONGEST_LINE:
        raise UsageError(
            f"{path}: a JSON list of {path.stat().st_size / 1e6:,.0f} MB, which must be read as a whole; the limit is "
            f"{LONGEST_LINE / 1e6:,.0f} MB",
            fix=f"write one object per line: jq -c '.[]' {path.name} > {path.stem}.jsonl",
        )
    text = "".join(line for _, line in lines(path, ends=True))
    number, place = 0, _after_space(text, text.find("[") + 1)
    try:
        while text and text[place] != "]":
            row, place = DECODER.raw_decode(text, place)
            place, number = _after_space(text, place), number + 1
            if not isinstance(row, Mapping):
                raise UsageError(
                    f"{path}, row {number}: a JSON {type(row).__name__}, not an object", fix="write a list of objects"
                )
            yield f"{path}, row {number}", row
            if text[place] not in ",]":
                raise ValueError(f"no comma after row {number}")
            place = _after_space(text, place + (text[place] == ","))
    except (ValueError, IndexError, RecursionError) as error:
        raise UsageError(f"{path}: not valid JSON ({error})", fix="write a list of objects") from None


def _after_space(text: str, place: int) -> int:
    """Return the place of the next character that is no white space, or the length of the text."""
    match = SPACE.match(text, place)
    return match.end() if match else place


def _separated(path: Path, delimiters: str) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file. The delimiter is the most frequent of `delimiters` in the heading."""
    csv.field_size_limit(LONGEST_LINE)
    texts = (text for _, text in lines(path, ends=True))
    before, first = 0, next(texts, "")
    if declared := re.fullmatch(r"sep=(.)\s*", first):  # a line that Excel writes before the heading
        before, first, delimiters = 1, next(texts, ""), declared[1]
    unquoted = re.sub(r'"[^"]*"', "", first)
    reader = csv.reader(chain([first], texts), delimiter=max(delimiters, key=unquoted.count), strict=True)
    start = before + 1
    try:
        names = [name.strip() for name in next(reader, [])]
        if repeated := next((name for name in names if name and names.count(name) > 1), None):
            raise UsageError(f"{path}: several columns are called {repeated!r}", fix="rename one of the columns")
        start = before + reader.line_num + 1
        for values in reader:
            where, start = f"{path}, line {start}", before + reader.line_num + 1
            if values and len(values) != len(names):
                raise UsageError(
                    f"{where}: the number of columns differs from the heading, {len(values)} instead of {len(names)}",
                    fix=f"quote values that contain {reader.dialect.delimiter!r}",
                )
            if values:
                yield where, {name: value for name, value in zip(names, values, strict=True) if name}
    except csv.Error as error:
        why = next((why for text, why in CSV_ERRORS.items() if text in str(error)), str(error))
        raise UsageError(
            f"{str(path)!r} is not a readable table: line {start}: {why}",
            fix='write a quote inside a quoted value twice: "say ""so"""',
        ) from None


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
def open_arrow(path: Path) -> Iterator[tuple[Any, Callable[[Collection[str]], Iterator[Any]]]]:
    """Yield the schema of a .parquet or .arrow file, and a function that yields batches of the named columns.

    Raises UsageError if pyarrow is not installed or the file is damaged.
    """
    arrow, is_parquet = arrow_for(path), path.suffix.lower() == ".parquet"
    from pyarrow import ipc, parquet

    try:
        with open_data_file(path) as content:
            is_file, _ = content.read(6) == b"ARROW1", content.seek(0)  # of the two Arrow formats, one has this mark
            if is_parquet:
                table = parquet.ParquetFile(content, page_checksum_verification=True)
                opened = table.schema_arrow, lambda names: table.iter_batches(batch_size=BATCH, columns=list(names))
            elif is_file:
                file = ipc.open_file(content)
                numbers = range(file.num_record_batches)
                opened = file.schema, lambda names: (file.get_batch(number).select(list(names)) for number in numbers)
            else:
                stream = ipc.open_stream(content)
                opened = stream.schema, lambda names: (batch.select(list(names)) for batch in stream)
            names = opened[0].names
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise UsageError(f"{path}: several columns are called {repeated!r}", fix="rename one of the columns")
            yield opened
    except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:  # a damaged page is an OSError
        what, fix = ("Parquet", "write the file again") if is_parquet else ("Arrow", SAVE_AGAIN)
        why = str(error).partition("\n")[0]
        raise UsageError(f"{str(path)!r} is not a readable {what} file: {why}", fix=fix) from None


def _arrow_rows(path: Path, columns: Collection[str]) -> Iterator[Row]:
    with open_arrow(path) as (schema, batches):
        missing = [name for name in columns if name not in schema.names]
        number = 0
        for batch in batches(columns if columns and not missing else schema.names):
            batch.validate(full=True)  # in a damaged file, offsets may point beyond the end
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row


_ARROW = (".parquet", ".arrow")
_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": json_rows,
    ".json": _json_file,
    ".csv": lambda path: _separated(path, DELIMITERS),
    ".tsv": lambda path: _separated(path, "\t"),
    **{suffix: lambda path: _arrow_rows(path, ()) for suffix in _ARROW},
}


def check_column(column: str, row: Collection[str], where: str) -> None:
    """Raise UsageError if a row or a list of columns lacks a column. The fix names the column with the longest text."""
    if column in row:
        return
    texts = {name: text for name, text in row.items() if isinstance(text, str)} if isinstance(row, Mapping) else {}
    longest = max(texts, key=lambda name: len(texts[name]), default="NAME")
    chosen = shlex.quote(longest) if len(longest) <= LONGEST_NAME else "NAME"
    is_separated = re.search(r"\.[ct]sv, line \d+$", where, re.IGNORECASE)
    heading = "; or begin the file with a line of column names" if is_separated else ""
    raise UsageError(
        f"{where}: no column {column!r}; there are: {', '.join(sorted(row)) or 'none'}",
        fix=f"--set data.column={chosen}{heading}",
    )


def row_texts(rows: Iterable[Row], column: str) -> Iterator[str]:
    """Return the text in a column of each row. Skip null and blank texts."""
    texts = (row_text(row, column, where) for where, row in rows)
    return (text for text in texts if text.strip())


def row_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return the text in a column of a row, or "" for null. Raises UsageError if the column is missing or not text."""
    check_column(column, row, where)
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
