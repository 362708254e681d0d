"""Summary of a text source before training, for `thrifty data look`."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thrifty.core.recipe import DataSettings
from thrifty.data.text.document_sources import TEXT, open_source
from thrifty.data.text.row_tables import first_row
from thrifty.data.text.token_cache import open_token_cache
from thrifty.data.text.token_windows import TokenWindows
from thrifty.data.train_split import DataSplit
from thrifty.kernels.keyed_permutation import permute

KEPT = ("split", "documents", "bytes", "tokens", "vocabulary", "bytes_per_token", "unigram_entropy")
"""Manifest fields of prepared tokens that a summary contains."""


@dataclass(frozen=True)
class LengthBin:
    """Number of documents with at least `low` and fewer than `high` tokens."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True)
class TextSummary:
    """Summary of a text source, with counts by part ("train" and "held_out")."""

    source: str
    folder: str
    split: str
    documents: dict[str, int]
    bytes: dict[str, int]
    tokens: dict[str, int]
    vocabulary: int
    bytes_per_token: float
    unigram_entropy: float
    """Cross-entropy of held-out tokens under the training frequencies of single tokens, in nats per token."""
    duplicates: float
    """Fraction of documents that equal an earlier document."""
    near_duplicates: dict | None
    """Report of left-out near-duplicates, see `DeduplicatedSource.report`."""
    lengths: list[LengthBin]
    examples: list[str]
    """Decoded training examples."""
    other_columns: list[str]
    """Other columns of a table, which may have labels."""


def inspect_text(settings: DataSettings, examples: int, say: Callable[[str], None]) -> TextSummary:
    """Return the summary of a source. Tokenize the source first if necessary. Raises UsageError like `open_text`."""
    prepared = open_token_cache(settings, say)
    manifest, tokenizer = prepared.manifest, prepared.tokenizer
    train = prepared.tokens(DataSplit.TRAIN)
    windows = TokenWindows(train, min(settings.length, len(train) - 1))
    chosen = permute(np.arange(min(examples, len(windows))), len(windows), 0)
    lengths = [document_lengths(prepared.tokens(part), tokenizer.end_of_text) for part in DataSplit]
    return TextSummary(
        source=settings.source,
        folder=str(prepared.folder),
        **{name: manifest[name] for name in KEPT},
        duplicates=_duplicates(settings),
        near_duplicates=manifest.get("near_duplicates"),
        lengths=histogram(np.concatenate(lengths)),
        examples=[tokenizer.decode(window.tolist()) for window in windows.at(chosen)],
        other_columns=[name for name in first_row(Path(settings.source)) if name != (settings.column or TEXT)],
    )


def document_lengths(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """Return the number of tokens of each document in a stream, without end-of-text tokens."""
    return np.diff(np.flatnonzero(tokens == end_of_text), prepend=-1) - 1


def histogram(lengths: np.ndarray) -> list[LengthBin]:
    """Return a histogram of lengths with powers of two as bin edges, shortest first."""
    powers = np.frexp(lengths)[1]  # a length of 2^(p-1) … 2^p - 1 has power p; 0 has power 0
    counts = np.bincount(powers)
    first = int(np.flatnonzero(counts)[0])
    return [LengthBin((1 << p) // 2, 1 << p, int(counts[p])) for p in range(first, len(counts))]


def _duplicates(settings: DataSettings) -> float:
    texts = open_source(settings.source, settings.column).documents()
    digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
    return 1 - len(set(digests)) / len(digests)
