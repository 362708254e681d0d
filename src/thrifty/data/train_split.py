"""Train and held-out split of documents by a hash of the text. Order and file names have no effect."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from thrifty.core.errors import UsageError

SCARCE = 0.25
"""Minimum size of each part after a split by hash, as a fraction of the intended size."""


class DataSplit(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class SplitPlan:
    """A train and held-out split of documents, and the size of the training part.

    A document is held out if the hash of its text, from 0 to 1, is below the held-out fraction. With few documents, one
    part may become almost empty. The end of the longest document is then held out instead.
    """

    held_out: float
    longest: bytes | None
    """Hash of the document whose end is held out; None for a split by hash."""
    train_characters: int
    key: Callable[[str], str] = str
    """Function that returns the text to hash. Documents with equal keys belong to the same part."""

    def parts(self, documents: Iterable[str]) -> Iterator[tuple[DataSplit, str]]:
        """Yield each document with its part. The longest document may be yielded in two pieces."""
        for text in documents:
            digest = _digest(self.key(text))
            if self.longest is None:
                yield _part(digest, self.held_out), text
            elif digest == self.longest:
                cut = _cut(text, self.held_out)
                yield DataSplit.TRAIN, text[:cut]
                yield DataSplit.HELD_OUT, text[cut:]
            else:
                yield DataSplit.TRAIN, text

    def sample(self, documents: Iterable[str], characters: int) -> Iterator[str]:
        """Yield training documents with about `characters` characters in total, chosen by hash."""
        fraction = min(1.0, characters / max(1, self.train_characters))
        for part, text in self.parts(documents):
            if part is DataSplit.TRAIN and (fraction == 1 or _fraction(_digest(self.key(text))[8:]) < fraction):
                yield text


def plan_split(documents: Iterable[str], held_out: float, name: str, key: Callable[[str], str] = str) -> SplitPlan:
    """Read all documents once and return their split. Documents with equal keys belong to the same part.

    Raises UsageError if there is not enough text to divide.
    """
    characters = {DataSplit.TRAIN: 0, DataSplit.HELD_OUT: 0}
    longest = (0, b"")
    for text in documents:
        digest = _digest(key(text))
        characters[_part(digest, held_out)] += len(text)
        longest = max(longest, (len(text), digest))
    total = sum(characters.values())
    if longest[0] < 2:
        raise UsageError(f"{name!r} has no text to train on", fix="--data my.txt, a file with text")
    enough = characters[DataSplit.HELD_OUT] >= SCARCE * held_out * total
    if enough and characters[DataSplit.TRAIN] >= SCARCE * (1 - held_out) * total:
        return SplitPlan(held_out, None, characters[DataSplit.TRAIN], key)
    return SplitPlan(held_out, longest[1], total, key)


def _part(digest: bytes, held_out: float) -> DataSplit:
    return DataSplit.HELD_OUT if _fraction(digest[:8]) < held_out else DataSplit.TRAIN


def _fraction(digest: bytes) -> float:
    return int.from_bytes(digest, "big") / 2**64


def _cut(text: str, held_out: float) -> int:
    """Return the index at which a text is cut. Both pieces have at least one character."""
    return min(max(1, round(len(text) * (1 - held_out))), len(text) - 1)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def label_entropy(train: np.ndarray, held_out: np.ndarray, labels: int) -> float:
    """Return the loss in nats on held-out labels without inputs: their cross-entropy under the training frequencies
    with add-one smoothing, or under equal frequencies, whichever is lower."""
    counts, tested = (np.bincount(each, minlength=labels) for each in (train, held_out))
    by_frequency = float(-(tested / tested.sum()) @ np.log((counts + 1) / (counts.sum() + labels)))
    return min(by_frequency, math.log(labels))
