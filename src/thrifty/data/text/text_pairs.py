"""Padded examples from pairs of source and target texts in a table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import ExampleIndex
from thrifty.core.errors import UsageError
from thrifty.data.epoch_sampler import fingerprint
from thrifty.data.text.document_sources import DocumentSource, FileSource
from thrifty.data.text.row_tables import first_row, open_table, table_files
from thrifty.data.text.text_readers import check_characters, lines

SIDES = ("source", "target")
SEPARATOR = "\0"
"""Separator of source and target when a pair is stored as one document. Texts must not contain this character."""


def holds_pairs(source: str) -> bool:
    """Return True if a source is a .tsv file, or another table whose first row has both sides."""
    path = Path(source).expanduser()
    return (path.is_file() and path.suffix.lower() == ".tsv") or all(side in first_row(path) for side in SIDES)


@dataclass(frozen=True)
class PairFile(DocumentSource):
    """A file of pairs: a .tsv file of two columns, or another table with the columns "source" and "target".

    In a .tsv file, quotes have no meaning, and a first line with the words source, tab, target is a heading. Pairs with
    a blank source or target are skipped. Pairs with the same source belong to the same part of the split. Raises
    UsageError with the line number for a line that is not a pair.
    """

    path: Path

    def documents(self) -> Iterator[str]:
        read = _tab_separated if self.path.suffix.lower() == ".tsv" else _pairs
        for where, pair in read(self.path):
            if any(SEPARATOR in text for text in pair):
                raise UsageError(f"{where}: a NUL character in the text", fix="remove the character")
            if all(text.strip() for text in pair):
                yield SEPARATOR.join(pair)

    def identity(self) -> str:
        return "pairs split by source " + FileSource(table_files(self.path)).identity()


def _tab_separated(path: Path) -> Iterator[tuple[str, list[str]]]:
    for number, line in lines(path):
        pair = line.split("\t")
        if not line.strip() or (number == 1 and pair == list(SIDES)):
            continue
        if len(pair) != len(SIDES):
            raise UsageError(
                f"{path}, line {number}: {len(pair)} columns, but a pair has two", fix="write: source, tab, target"
            )
        yield f"{path}, line {number}", pair


def _pairs(path: Path) -> Iterator[tuple[str, list[str]]]:
    for where, row in chain.from_iterable(open_table(file, SIDES).rows for file in table_files(path)):
        pair = [row.get(side) for side in SIDES]
        if not all(isinstance(text, str | None) for text in pair) or not all(side in row for side in SIDES):
            raise UsageError(f"{where}: not a pair", fix="write rows with source and target")
        texts = [text or "" for text in pair]
        for side, text in zip(SIDES, texts, strict=True):
            check_characters(text, f"{where}: {side!r}")
        yield where, texts


class TextPairs:
    """Pairs from a token stream as examples of equal length. An end-of-text token ends each source and target.

    {"source": (b, s), "source_keep": bool (b, s), "tokens": (b, t+1), "counted": bool (b, t)} with s = t = `length`.
    "tokens" starts with an end-of-text token, the start token of the decoder; the target follows. Texts longer
    than `length` are cut, and shorter texts are padded with end-of-text tokens. "source_keep" and "counted" are False
    on padding.
    """

    def __init__(self, tokens: np.ndarray, length: int, end_of_text: int):
        self.tokens, self.length, self.end_of_text = tokens, length, end_of_text
        ends = np.flatnonzero(tokens == end_of_text) + 1
        begins = np.concatenate(([0], ends))[:-1]
        self.begins, self.sizes = begins.reshape(-1, 2), (ends - begins).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def cut(self) -> float:
        """Fraction of pairs whose source or target is longer than `length`."""
        return float((self.sizes > self.length).any(axis=1).mean())

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        source, source_keep = self._side(indices, 0)
        target, counted = self._side(indices, 1)
        start = np.full((len(indices), 1), self.end_of_text)
        rows = {"source": source, "source_keep": source_keep, "tokens": np.hstack((start, target)), "counted": counted}
        return {name: torch.from_numpy(values) for name, values in rows.items()}

    def texts(self, indices: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]:
        """Return the decoded pairs at `indices`."""
        rows = self.fields(indices)
        sides = zip(rows["source"].tolist(), rows["tokens"][:, 1:].tolist(), strict=True)
        return [" → ".join(decode(self._unpadded(side)) for side in both) for both in sides]

    def _unpadded(self, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(self.end_of_text)] if self.end_of_text in tokens else tokens

    def example_index(self) -> ExampleIndex:
        return ExampleIndex(len(self), self._fingerprint)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.tokens, also=self.length)

    def _side(self, indices: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources (side 0) or targets (side 1), and a mask that is False on padding, (b, length) each."""
        offsets = np.arange(self.length)
        kept = offsets < self.sizes[indices, side, None]
        places = np.where(kept, self.begins[indices, side, None] + offsets, 0)
        return np.where(kept, self.tokens[places].astype(np.int64), self.end_of_text), kept
