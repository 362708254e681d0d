"""Which documents are held out: a function of each document's own text, whatever their order or files, or of the part
of the text that documents may share."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from thrifty.core.errors import UsageError

SCARCE = 0.25
"""The split by hash is good enough when the held-out text has this share of the bytes it should have."""


class DataSplit(StrEnum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class SplitPlan:
    """How the documents of a source are divided, and how large the training part is.

    A document is held out when the hash of its text falls into the chosen fraction. Where the documents are so few that
    this leaves next to nothing on one side, all are trained on and the end of the longest one is held out instead.
    """

    held_out: float
    longest: bytes | None
    """Digest of the document whose end is held out, where the split is not by hash."""
    train_characters: int
    key: Callable[[str], str] = str
    """Returns the part of a document that decides: documents that share it stay on one side."""

    def parts(self, documents: Iterable[str]) -> Iterator[tuple[DataSplit, str]]:
        """Each document with the part it belongs to; the longest one may come in two pieces."""
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
        """Training text of about this many characters, chosen by the documents' hashes."""
        share = min(1.0, characters / max(1, self.train_characters))
        for part, text in self.parts(documents):
            if part is DataSplit.TRAIN and (share == 1 or _fraction(_digest(self.key(text))[8:]) < share):
                yield text


def plan_split(documents: Iterable[str], held_out: float, name: str, key: Callable[[str], str] = str) -> SplitPlan:
    """Read the documents once and decide; documents that share a `key` stay on one side. Raises UsageError where there
    is not enough text to divide."""
    characters = {DataSplit.TRAIN: 0, DataSplit.HELD_OUT: 0}
    longest = (0, b"")
    for text in documents:
        digest = _digest(key(text))
        characters[_part(digest, held_out)] += len(text)
        longest = max(longest, (len(text), digest))
    total = sum(characters.values())
    if longest[0] < 2:
        raise UsageError(f"{name} holds no text to train on", fix="give a source with some text in it")
    enough = characters[DataSplit.HELD_OUT] >= SCARCE * held_out * total
    if enough and characters[DataSplit.TRAIN] >= SCARCE * (1 - held_out) * total:
        return SplitPlan(held_out, None, characters[DataSplit.TRAIN], key)
    return SplitPlan(held_out, longest[1], total, key)


def _part(digest: bytes, held_out: float) -> DataSplit:
    return DataSplit.HELD_OUT if _fraction(digest[:8]) < held_out else DataSplit.TRAIN


def _fraction(digest: bytes) -> float:
    return int.from_bytes(digest, "big") / 2**64


def _cut(text: str, held_out: float) -> int:
    """Where the held-out end of a text begins: both pieces have at least one character."""
    return min(max(1, round(len(text) * (1 - held_out))), len(text) - 1)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def label_entropy(train: np.ndarray, held_out: np.ndarray, labels: int) -> float:
    """Nats per held-out label under the training frequencies, each label counted once more than it is there."""
    share, tested = (np.bincount(each, minlength=labels) for each in (train, held_out))
    return float(-(tested / tested.sum()) @ np.log((share + 1) / (share.sum() + labels)))
