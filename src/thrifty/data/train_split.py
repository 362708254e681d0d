"""Train and held-out split of documents by a hash of the text. Order and file names have no effect."""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from thrifty.core.errors import UsageError

NEAR = 2.0
"""Largest ratio, or inverse ratio, of the held-out part of a split by hash to its intended size."""


class DataSplit(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class SplitPlan:
    """A train and held-out split of documents, and the size of the training part.

    A document is held out if the hash of its text, from 0 to 1, is below `held_out`, the intended fraction. With few
    documents, the size of the part may be far from the intended size. Then the end of the longest document is held out
    instead if it is long enough; otherwise `held_out` is another number, with which the size is as near as possible.
    """

    held_out: float
    longest: bytes | None
    """Hash of the document whose end is held out; None for a split by hash."""
    train_characters: int
    key: Callable[[str], str] = str
    """Function that returns the text to hash. Documents with equal keys belong to the same part."""
    end: int = 0
    """Number of characters at the end of the longest document that are held out."""

    def parts(self, documents: Iterable[str]) -> Iterator[tuple[DataSplit, str]]:
        """Yield each document with its part. The longest document may be yielded in two pieces."""
        for text in documents:
            digest = _digest(self.key(text))
            if self.longest is None:
                yield _part(digest, self.held_out), text
            elif digest == self.longest:
                cut = min(max(1, len(text) - self.end), len(text) - 1)  # each piece has at least one character
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
    hashed, lengths, longest = array("d"), array("q"), (0, b"")
    for text in documents:
        digest = _digest(key(text))
        hashed.append(_fraction(digest[:8]))
        lengths.append(len(text))
        longest = max(longest, (len(text), digest))
    if longest[0] < 2:
        raise UsageError(f"{name!r} has no text to train on", fix="--data my.txt, a file with text")
    order = np.argsort(hashed)
    at, below = np.array(hashed)[order], np.array([0, *np.array(lengths)[order].cumsum()])
    total, target = int(below[-1]), held_out * int(below[-1])
    size = int(below[at.searchsorted(held_out)])
    if target / NEAR <= size <= target * NEAR and total - size >= (total - target) / NEAR:
        return SplitPlan(held_out, None, total - size, key)
    thresholds = np.unique(at)[1:]  # each leaves documents on both sides
    if longest[0] >= NEAR * target or not len(thresholds):
        return SplitPlan(held_out, longest[1], total, key, round(target))
    sizes = below[at.searchsorted(thresholds)]
    nearest = np.abs(sizes - target).argmin()
    return SplitPlan(float(thresholds[nearest]), None, total - int(sizes[nearest]), key)


def _part(digest: bytes, held_out: float) -> DataSplit:
    return DataSplit.HELD_OUT if _fraction(digest[:8]) < held_out else DataSplit.TRAIN


def _fraction(digest: bytes) -> float:
    return int.from_bytes(digest, "big") / 2**64


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def label_entropy(train: np.ndarray, held_out: np.ndarray, labels: int) -> float:
    """Return the loss in nats on held-out labels without inputs: their cross-entropy under the training frequencies
    with add-one smoothing, or under equal frequencies, whichever is lower."""
    counts, tested = (np.bincount(each, minlength=labels) for each in (train, held_out))
    by_frequency = float(-(tested / tested.sum()) @ np.log((counts + 1) / (counts.sum() + labels)))
    return min(by_frequency, math.log(labels))
