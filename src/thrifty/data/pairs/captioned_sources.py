"""Sources of images with captions: a folder or a table.

A folder contains captions in one of these forms:

- a table: captions or metadata with the suffix .jsonl, .csv, .tsv or .parquet;
- captions.txt with a line for each image, in the order of the file names;
- a text file for each image, with the same name and one caption per line.

Instead, a folder may contain two folders in one of these forms, named train, and val or test. A table row has the
path or the bytes of an image.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from thrifty.core.errors import UsageError
from thrifty.data.images.image_listing import (
    files_below,
    folder_state,
    has_image_files,
    images_below,
    split_folders,
)
from thrifty.data.pairs.caption_tables import TABLES, CaptionedRow, is_table, table_paths, table_rows
from thrifty.data.skipped_files import printable
from thrifty.data.text.text_readers import lines

NAMED_TABLES = tuple(f"{name}{suffix}" for name in ("captions", "metadata") for suffix in TABLES)
IN_ORDER = "captions.txt"
ANY_COLUMN = "text"
"""Default of `data.column`. Captions may then be in any known column."""


class CaptionedSource(Protocol):
    """A source of images with captions."""

    def rows(self) -> Iterator[CaptionedRow]:
        """Yield every image with captions, and rows without image or caption, always in the same order."""

    def identity(self) -> str:
        """Return a hash that changes when the rows may have changed."""


def holds_captioned(source: str) -> bool:
    """Return True for a table or a folder of images with captions."""
    path = Path(source).expanduser()
    if path.is_dir():
        return has_image_files(path) and any(_has_captions(root) for _, root in split_folders(path))
    return path.is_file() and is_table(path)


def open_captioned(source: str, column: str) -> CaptionedSource:
    """Return the source for a path. `column` is the column of captions in a table.

    Raises UsageError for any other path.
    """
    path, captions = Path(os.path.abspath(Path(source).expanduser())), "" if column == ANY_COLUMN else column
    if path.is_file() and path.suffix.lower() in TABLES:
        return CaptionTable(path, captions)
    if path.is_dir() and has_image_files(path) and any(_has_captions(root) for _, root in split_folders(path)):
        return CaptionedFolder(path, captions)
    if path.is_dir():
        what = "images, but no captions" if has_image_files(path) else "no images"
        raise UsageError(
            f"{path}: {what}", fix='add captions.jsonl, with lines such as {"image": "a.jpg", "caption": "..."}'
        )
    if path.is_file():
        raise UsageError(
            f"{path}: cannot read captions from {path.suffix} files", fix="convert it to .jsonl, .csv, .tsv or .parquet"
        )
    raise UsageError(
        f"{source}: no such file or folder", fix="set data.source to a path; or to a set of `thrifty data list`"
    )


@dataclass(frozen=True)
class CaptionTable:
    """A table of images with captions. Relative image paths start at the folder of the file."""

    path: Path
    column: str = ""

    def rows(self) -> Iterator[CaptionedRow]:
        return table_rows(self.path, self.column)

    def identity(self) -> str:
        return folder_state([self.path, *table_paths(self.path, self.column)])


@dataclass(frozen=True)
class CaptionedFolder:
    """A folder of images with captions, or a folder that contains a folder of images with captions for each part."""

    path: Path
    column: str = ""

    def rows(self) -> Iterator[CaptionedRow]:
        for part, root in split_folders(self.path):
            for row in self._rows_of(root):
                yield row if part is None else replace(row, part=part)

    def identity(self) -> str:
        outside = (path for table in self._tables() for path in table_paths(table, self.column))
        parts = "/".join(root.name for part, root in split_folders(self.path) if part)
        return folder_state([self.path.absolute(), *files_below(self.path), *outside]) + parts

    def _tables(self) -> Iterator[Path]:
        yield from (table for _, root in split_folders(self.path) if (table := _table_in(root)))

    def _rows_of(self, root: Path) -> Iterator[CaptionedRow]:
        if table := _table_in(root):
            in_table = set()
            for row in table_rows(table, self.column):
                in_table.add(row.image)
                yield row
            yield from (CaptionedRow(_name(path, root), path) for path in images_below(root) if path not in in_table)
        elif _is_list(root):
            yield from _rows_of_list(root)
        else:
            yield from _rows_of_text_files(root)


def _has_captions(root: Path) -> bool:
    return bool(_table_in(root)) or _is_list(root) or any(_caption_of(path).is_file() for path in images_below(root))


def _table_in(root: Path) -> Path | None:
    return next((path for name in NAMED_TABLES if (path := root / name).is_file()), None)


def _is_list(root: Path) -> bool:
    """Return True if captions.txt is a list of captions, not the caption of an image named captions."""
    path = root / IN_ORDER
    return path.is_file() and not any(_caption_of(image) == path for image in images_below(root))


def _rows_of_list(root: Path) -> Iterator[CaptionedRow]:
    images = list(images_below(root))
    captions = [text for _, text in lines(root / IN_ORDER)]
    if len(images) != len(captions):
        raise UsageError(
            f"{str(root / IN_ORDER)!r} has {len(captions)} lines, but {str(root)!r} has {len(images)} images",
            fix="write one line per image; or write captions.tsv with lines of image, tab, caption",
        )
    for path, text in zip(images, captions, strict=True):
        yield CaptionedRow(_name(path, root), path, (text,))


def _rows_of_text_files(root: Path) -> Iterator[CaptionedRow]:
    used = set()
    for path in images_below(root):
        caption = _caption_of(path)
        used.add(caption)
        if not caption.is_file():
            yield CaptionedRow(_name(path, root), path)
            continue
        try:
            yield CaptionedRow(_name(path, root), path, tuple(text for _, text in lines(caption)))
        except UsageError as error:
            yield CaptionedRow(_name(caption, root), path, why=error.what.partition(": ")[2])
    for path in files_below(root):
        if path.suffix.lower() == ".txt" and path not in used:
            yield CaptionedRow(_name(path, root), None)


def _caption_of(image: Path) -> Path:
    return image.with_suffix(".txt")


def _name(path: Path, root: Path) -> str:
    return printable(str(path.relative_to(root)))
