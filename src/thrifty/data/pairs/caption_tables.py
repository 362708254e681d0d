"""Tables of images with captions.

The image of a row is in one of the columns `IMAGES` or `CONTENTS`:

- a path, relative to the table's folder or absolute;
- the bytes of the file, as base64 in JSON;
- {"bytes": ..., "path": ...}, as in data sets of the Hugging Face hub.

The caption, or a list of captions, is in the column that the user names, or in one of `CAPTIONS`. The optional column
"split" names the part (training or held-out). An image may have several rows. URLs are never downloaded.
"""

import base64
import binascii
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.data.images.image_listing import PART_FOLDERS, is_image_name, part_of
from thrifty.data.text.row_tables import arrow_for, open_arrow, open_table
from thrifty.data.text.text_readers import check_characters, lines
from thrifty.data.train_split import DataSplit

TABLES = (".jsonl", ".csv", ".tsv", ".parquet")
IMAGES = ("image", "image_path", "path", "file_name", "filename", "filepath", "file")
CONTENTS = ("bytes", "image_bytes", "base64", "image_base64")
CAPTIONS = ("caption", "captions", "text", "texts", "title", "description")
SPLIT = "split"


@dataclass(frozen=True)
class CaptionedRow:
    """An image with captions. `image` is None for captions without an image. `why` is the reason for an error."""

    name: str
    image: Path | bytes | None
    captions: tuple[str, ...] = ()
    part: DataSplit | None = None
    why: str = ""
    outside: bool = False
    """True if the image has an absolute path outside of the table's folder."""


def is_table(path: Path) -> bool:
    """Return True if the first row of a table has an image and a caption.

    The path of the image must have an image suffix, because tables of text may also contain paths.
    """
    if path.suffix.lower() not in TABLES:
        return False
    try:
        _, row = next(_dictionaries(path, ""))
    except (UsageError, StopIteration):
        return False
    key = _first(row, (*IMAGES, *CONTENTS))
    if key is None or _first(row, CAPTIONS) is None:
        return False
    value = row[key]
    if isinstance(value, str) and key in IMAGES and not value.startswith("data:image/"):
        return is_image_name(Path(value).name)
    return isinstance(value, str | bytes) or (isinstance(value, dict) and bool(value.keys() & {"bytes", "path"}))


def table_rows(path: Path, column: str = "") -> Iterator[CaptionedRow]:
    """Yield the rows of a table. `column` is the column of captions; if empty, one of `CAPTIONS` is used.

    Raises UsageError with the position of an invalid row. Causes are a missing column, a value of a wrong type, a
    relative path out of the folder, and an unknown part.
    """
    for where, row in _dictionaries(path, column):
        yield _row(row, column, where, path.parent)


def table_paths(path: Path, column: str = "") -> Iterator[Path]:
    """Yield the image files of a table."""
    if path.suffix.lower() == ".parquet" and not _names_files(path):
        return
    yield from (row.image for row in table_rows(path, column) if isinstance(row.image, Path))


def _row(row: Mapping[str, Any], column: str, where: str, root: Path) -> CaptionedRow:
    key, named = _first(row, (*IMAGES, *CONTENTS)), _captions_column(row, column)
    if key is None or named is None:
        _refuse_columns(row, key, column, where)
    captions, part = _captions(row[named], where), _part(row.get(SPLIT), where)
    value, embedded = row[key], key in CONTENTS
    if isinstance(value, dict):
        embedded = bool(value.get("bytes"))
        value = value["bytes"] if embedded else value.get("path")
    name = value if isinstance(value, str) and key in IMAGES and len(value) < 200 else where.rpartition("/")[2]
    if value is None or isinstance(value, bytes):
        return CaptionedRow(name, value, captions, part)
    if not isinstance(value, str):
        raise UsageError(
            f"{where}: {key!r} holds {type(value).__name__}, not a path or bytes", fix="write the path of the image"
        )
    check_characters(value, f"{where}: the image")
    if embedded or value.startswith("data:"):
        content = _decoded(value)
        return CaptionedRow(name, content, captions, part, why="" if content else "its base64 is damaged")
    return _of_path(value, root, CaptionedRow(name, None, captions, part), where)


def _of_path(value: str, root: Path, row: CaptionedRow, where: str) -> CaptionedRow:
    if "://" in value or "\0" in value:
        why = "a URL, which is not downloaded" if "://" in value else "its path contains a NUL character"
        return CaptionedRow(row.name, None, row.captions, row.part, why)
    path = Path(os.path.normpath(value))
    if path.is_absolute():
        outside = Path(os.path.abspath(root)) not in path.parents
        return CaptionedRow(row.name, path, row.captions, row.part, outside=outside)
    if path.parts[:1] == ("..",):
        raise UsageError(
            f"{where}: the image {value!r} is outside of {str(root)!r}",
            fix="move the image below that folder; or write its absolute path",
        )
    return CaptionedRow(row.name, root / path, row.captions, row.part)


def _captions(value: Any, where: str) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [] if value is None else [value]
    for text in texts:
        if not isinstance(text, str):
            raise UsageError(
                f"{where}: a caption is {type(text).__name__}, not text", fix="set data.column to a column of text"
            )
        check_characters(text, f"{where}: the caption")
    return tuple(texts)


def _part(value: Any, where: str) -> DataSplit | None:
    if value is None or value == "":
        return None
    part = part_of(value) if isinstance(value, str) else None
    if part is None:
        raise UsageError(
            f"{where}: {SPLIT!r} is {value!r}, not a known part", fix=did_you_mean(str(value), PART_FOLDERS)
        )
    return part


def _decoded(text: str) -> bytes:
    """Return the bytes of base64 text or of a data URL; empty if the text is damaged."""
    try:
        return base64.b64decode(text.rpartition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        return b""


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in row), None)


def _captions_column(row: Mapping[str, Any], column: str) -> str | None:
    return (column if column in row else None) if column else _first(row, CAPTIONS)


def _refuse_columns(row: Mapping[str, Any], image: str | None, column: str, where: str) -> NoReturn:
    if image is None:
        missing, fix = "image", f"rename the image column to one of {', '.join((*IMAGES, *CONTENTS))}"
    elif column:
        missing, fix = repr(column), "set data.column to the column of captions"
    else:
        missing, fix = "caption", f"set data.column; or rename the caption column to one of {', '.join(CAPTIONS)}"
    raise UsageError(f"{where}: no column {missing}; there are: {', '.join(sorted(row)) or 'none'}", fix=fix)


def _dictionaries(path: Path, column: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix.lower() == ".parquet":
        return _parquet(path, column)
    return _tab_separated(path, column) if path.suffix.lower() == ".tsv" else iter(open_table(path).rows)


def _tab_separated(path: Path, column: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the rows of a .tsv file. Without a heading, the columns are image and caption."""
    heading: list[str] | None = None
    for number, line in lines(path):
        if not line.strip():
            continue
        values = line.split("\t")
        if heading is None:
            names = [value.strip() if value == column else value.strip().lower() for value in values]
            is_heading = _first(dict.fromkeys(names), (*IMAGES, *CONTENTS)) is not None
            heading = names if is_heading else [IMAGES[0], column or CAPTIONS[0]]
            if is_heading:
                continue
        if len(values) != len(heading):
            raise UsageError(
                f"{path}, line {number}: {len(values)} columns instead of {len(heading)}",
                fix=f"write: {', tab, '.join(heading)}",
            )
        yield f"{path}, line {number}", dict(zip(heading, values, strict=True))


def _parquet(path: Path, column: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a .parquet file. Read only the required columns."""
    with open_arrow(path) as (schema, _):
        names = dict.fromkeys(schema.names)
    image, caption = _first(names, (*IMAGES, *CONTENTS)), _captions_column(names, column)
    if image is None or caption is None:
        _refuse_columns(names, image, column, str(path))
    yield from open_table(path, [name for name in (image, caption, SPLIT) if name in names]).rows


def _names_files(path: Path) -> bool:
    """Return True if the images of a Parquet file may be paths instead of bytes."""
    types = arrow_for(path).types
    try:
        with open_arrow(path) as (schema, _):
            image = _first(dict.fromkeys(schema.names), (*IMAGES, *CONTENTS))
            kind = None if image is None else schema.field(image).type
            return kind is not None and not types.is_binary(kind) and not types.is_large_binary(kind)
    except UsageError:
        return False  # reading rows raises the error
