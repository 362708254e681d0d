"""Sources of documents: a file, a folder, a data set of the catalogue such as kjv, or a data set of the Hugging Face
hub.

`open_source` returns the source for a name. A `DocumentSource` can be read repeatedly. Its identity changes when the
contents of files change; the identity of a hub data set is its name.
"""

import difflib
import hashlib
import os
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

from thrifty.core.errors import IntegrityError, UsageError, did_you_mean, reason_of
from thrifty.core.user_sources import HUB
from thrifty.data.catalogue import PYTHON_STDLIB, CatalogueEntry, entries
from thrifty.data.fetched_sets import DOCUMENTS, find_damage, read_origin
from thrifty.data.skipped_files import SkippedFiles
from thrifty.data.text.python_sources import python_files
from thrifty.data.text.row_tables import (
    Row,
    check_column,
    first_row,
    is_saved_dataset,
    is_table,
    json_rows,
    open_table,
    row_texts,
    saved_splits,
    table_files,
)
from thrifty.data.text.text_readers import foreign_content, lines, text_passages, whole_text

TEXT = "text"
"""Default column of texts."""
BINARY_TABLES = (".parquet", ".arrow")
COMPRESSED = {
    ".gz": "gunzip -k", ".zst": "zstd -d", ".bz2": "bunzip2 -k", ".xz": "xz -dk", ".zip": "unzip", ".tar": "tar -xf",
    ".tgz": "tar -xf",
}  # fmt: skip
"""Command that unpacks each format."""


class DocumentSource(Protocol):
    """A source of documents, each a text."""

    def documents(self) -> Iterator[str]:
        """Yield every document that is not blank, always in the same order."""

    def identity(self) -> str:
        """Return a hash that changes when the documents may have changed."""

    def size(self) -> int:
        """Return the number of bytes of the files; 0 if it is unknown."""
        return 0

    def left_out(self) -> str:
        """Return a message that counts and names unreadable files, or an empty string. Call it after `documents`."""
        return ""


def open_source(source: str, column: str = "") -> DocumentSource:
    """Return the source for a name: a known data set, a path, or hub:owner/name.

    A known data set has priority over a path: write ./kjv for a folder named kjv. Raises UsageError if there is no
    readable source.
    """
    column = column or TEXT
    if source.startswith(HUB):
        return HubSource(source.removeprefix(HUB), column)
    if source in entries():
        return _named(entries()[source])
    path = Path(source).expanduser()
    if path.is_dir():
        if is_saved_dataset(path):
            return FileSource(table_files(path), column)
        unread: dict[Path, str] = {}
        return FileSource(_files_below(path, unread), column, folder=True, unread=unread)
    if path.is_file():
        refuse_compressed(path)
        return FileSource((path,), column)
    raise _nothing_there(source)


def holds_text(source: str, column: str = "") -> bool:
    """Return True for a known set of text, a folder with texts, a text file, and a table with the column of texts."""
    if source in entries():
        return entries()[source].kind == "text"
    path = Path(source).expanduser()
    if table_files(path):
        return (column or TEXT) in first_row(path)
    try:
        return (path.is_dir() and bool(_files_below(path, {}))) or (path.is_file() and not foreign_content(path))
    except UsageError:
        return False


def refuse_compressed(path: Path) -> None:
    """Raise UsageError for a compressed file or an archive."""
    if unpack := COMPRESSED.get(path.suffix.lower()):
        raise UsageError(
            f"{path}: compressed files are not read", fix=f"{unpack} {shlex.quote(str(path))}; then pass the result"
        )


@dataclass(frozen=True)
class FileSource(DocumentSource):
    """A sequence of files: tables are read row by row, other files as text.

    Unreadable files of a folder are left out.
    """

    files: tuple[Path, ...]
    column: str = "text"
    folder: bool = False
    """True if each text file is one document. A text file outside a folder is cut into passages."""
    unread: dict[Path, str] = field(default_factory=dict, compare=False)
    """Files of the folder that are left out, each with the reason; files that were checked have an empty reason."""

    def documents(self) -> Iterator[str]:
        for path in self.files:
            if self.folder and self._problem(path):
                continue
            if self._has_rows(path):
                yield from row_texts(open_table(path, (self.column,)).rows, self.column)
            else:
                yield from whole_text(path) if self.folder else text_passages(path)
        if all(map(self.unread.get, self.files)):
            raise UsageError(f"no text, and {self.left_out()}", fix="--set data.column=NAME; or save files as UTF-8")

    def _has_rows(self, path: Path) -> bool:
        """Return True for a table. In a folder, a .json file is a text, because it is often a file of settings."""
        return is_table(path) and not (self.folder and path.suffix.lower() == ".json")

    def _problem(self, path: Path) -> str:
        """Return why a file of a folder is left out: it is no UTF-8 text, or a table without the column of texts."""
        if path not in self.unread:
            self.unread[path] = ""
            try:
                if path.suffix.lower() not in BINARY_TABLES:
                    deque(lines(path), maxlen=0)
                if self._has_rows(path) and (first := next(iter(open_table(path).rows), None)):
                    check_column(self.column, first[1], first[0])
            except UsageError as error:
                self.unread[path] = error.what.removeprefix(f"{path}").lstrip(", :")
        return self.unread[path]

    def identity(self) -> str:
        return _file_states(self.files)

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def left_out(self) -> str:
        return _left_out(self.unread)


@dataclass(frozen=True)
class FetchedSet(DocumentSource):
    """A downloaded set of texts or conversations. Raises IntegrityError if its files are damaged."""

    entry: CatalogueEntry

    def documents(self) -> Iterator[str]:
        return row_texts(self.rows(), "text")

    def rows(self) -> Iterator[Row]:
        if damage := find_damage(self.entry):
            raise IntegrityError(f"{self.entry.folder}: {damage}", fix=f"thrifty data get {self.entry.name}")
        return json_rows(self.entry.folder / DOCUMENTS)

    def identity(self) -> str:
        return read_origin(self.entry)["files"][DOCUMENTS]


@dataclass(frozen=True)
class HubSource(DocumentSource):
    """The training split of a data set on the Hugging Face hub, or in a local folder of that name."""

    dataset: str
    column: str
    remedy: ClassVar[str] = "check the name, the network, and that the set has a split called train"

    @property
    def label(self) -> str:
        return HUB + self.dataset

    def documents(self) -> Iterator[str]:
        with self._library() as datasets:
            rows = self.training_rows(datasets)
            check_column(self.column, rows.column_names, self.label)
            numbered = enumerate(rows.select_columns(self.column))
            yield from row_texts(((f"{self.label}, row {number}", row) for number, row in numbered), self.column)

    def splits(self) -> Mapping[str, Any]:
        """Return the rows of every split by split name. Raises UsageError if the set cannot be read."""
        with self._library() as datasets:
            return self.all_rows(datasets)

    @contextmanager
    def _library(self) -> Iterator[ModuleType]:
        """Yield the package `datasets`. Raises UsageError if the package is not installed, and for errors in the
        block."""
        try:
            import datasets
        except ImportError:
            raise UsageError(
                f"{self.label} requires the datasets package, which is not installed",
                fix="pip install 'thrifty[hub]'",
            ) from None
        try:
            yield datasets
        except UsageError:
            raise
        except Exception as error:  # errors of many packages are possible
            raise UsageError(f"{self.label} cannot be read: {reason_of(error)}", fix=self.remedy) from error

    def training_rows(self, datasets: ModuleType) -> Any:
        return datasets.load_dataset(self.dataset, split="train")

    def all_rows(self, datasets: ModuleType) -> Mapping[str, Any]:
        return datasets.load_dataset(self.dataset)

    def identity(self) -> str:
        """Return a hash of the name only. Prepared tokens can thus be used again without network access."""
        return _hash(self.label)


_NO_TEXT = {
    "model": ("a pretrained model", "set data.source to a text set, see `thrifty data list`"),
    "chats": ("a set of conversations", "set objective.name = chat_answers"),
    "images": (
        "a set of images",
        "set objective.name = classification, and an image model such as model.preset = vit-nano",
    ),
    "pairs": (
        "a set of images with captions",
        "set objective.name = contrastive, and an image-text model such as model.preset = clip-nano",
    ),
}
"""Description and fix of an error, for each kind of catalogue entry that is not text."""


def _named(entry: CatalogueEntry) -> DocumentSource:
    if entry.name == PYTHON_STDLIB:
        return FileSource(python_files(), folder=True)
    if entry.kind != "text":
        what, fix = _NO_TEXT[entry.kind]
        raise UsageError(f"{entry.name!r} is {what}, not text", fix=fix)
    if not entry.present:
        raise UsageError(f"the set {entry.name!r} is not on this machine yet", fix=f"thrifty data get {entry.name}")
    return FetchedSet(entry)


def _files_below(folder: Path, unread: dict[Path, str]) -> tuple[Path, ...]:
    """Return all files below a folder in sorted order, except hidden files.

    Of a `save_to_disk` folder, the files of the training split are returned. Unreadable files are added to `unread`.
    """
    files = _visible_files(folder)
    text = tuple(path for path in files if _may_be_text(path, unread))
    if not text:
        what = f"no text, and {_left_out(unread)}" if unread else "no files"
        raise UsageError(f"{folder}: {what}", fix="set data.source to a folder of text files or tables")
    return text


def _visible_files(folder: Path) -> Iterator[Path]:
    for root, inner, names in os.walk(folder):
        if is_saved_dataset(Path(root)):
            inner.clear()
            yield from saved_splits(Path(root))["train"]
            continue
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(names) if not name.startswith("."))


def _left_out(unread: Mapping[Path, str]) -> str:
    """Return a line that counts and names files. Files without a reason are not left out."""
    skipped = SkippedFiles()
    for path, why in unread.items():
        if why:
            skipped.add(path, why)
    return f"{skipped.count} files are left out: {skipped}" if skipped.count else ""


def _may_be_text(path: Path, unread: dict[Path, str]) -> bool:
    try:
        why = "" if path.suffix.lower() in BINARY_TABLES and path.is_file() else foreign_content(path)
    except UsageError as error:
        why = error.what.removeprefix(f"{path} ")
    except OSError as error:
        why = error.strerror or "cannot be read"
    if why:
        unread[path] = "compressed" if path.suffix.lower() in COMPRESSED else why
    return not why


def _nothing_there(source: str) -> UsageError:
    path = Path(source)
    if path.exists():
        return UsageError(f"{source}: not a regular file", fix="set data.source to a file or a folder")
    if path.suffix or len(path.parts) > 1:
        there = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, 1, 0.8)
        fix = f"--data {shlex.quote(str(path.with_name(near[0])))}" if near else "--data my.txt, an existing file"
        return UsageError(f"'{source}': no such file or folder", fix)
    texts = [entry.name for entry in entries().values() if entry.kind == "text"]
    return UsageError(f"{source!r} is neither a file, a folder nor a known data set", fix=did_you_mean(source, texts))


def _file_states(files: Iterable[Path]) -> str:
    """Return a hash of paths, sizes and modification times. Contents are not read."""
    states = ((path.absolute(), path.stat()) for path in files)
    return _hash("\n".join(f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in states))


def _hash(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=16).hexdigest()
