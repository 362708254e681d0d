"""Near-duplicates: a document that shares most of its runs of words with one before it is left out.

Two documents are alike as the sets of their runs of five words are: what both have over what either has (Jaccard;
Broder 1997, On the resemblance and containment of documents). That is estimated from 128 least hashes of each, with a
standard error of 0.035 at 0.8; locality-sensitive hashing, by the library datasketch, finds whom to compare with. Of
pairs that are exactly as alike as the threshold it overlooks about one in eight, of those 0.05 above it one in forty.
On Python sources 10 MB a second of one core; 6 kB of memory for each document that stays.

A document is compared with those that were kept, so the first of a group stays, and no two that stay are found alike:
the split that comes after cannot divide a pair between training and held-out text.
"""

import hashlib
import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.data.text.document_sources import DocumentSource
from thrifty.kernels.keyed_permutation import mix_bits

RUN = 5
"""Words that follow one another and are compared as one."""
HASHES = 128
OVERLOOKING = (0.1, 0.9)
"""How bad it is to compare in vain, and to overlook a pair; what is found alike is compared in any case."""
METHOD = 1
"""Changes whenever other documents would be left out."""
SHOWN, EXCERPT, BEFORE = 5, 160, 40
"""Pairs that are told of; characters of each, and how many of those are before the first difference."""
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
"""Letters and digits together; where a script writes no spaces, each sign by itself."""
KNOWN_WORDS = 1_000_000
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class DuplicatePair:
    """A document that is left out for another; both by their numbers in the source, from 0."""

    kept: int
    left_out: int
    similarity: float


class _WordHashes(dict[str, int]):
    """A number of 64 bits for each word, the same on every machine."""

    def __missing__(self, word: str) -> int:
        if len(self) >= KNOWN_WORDS:
            self.clear()
        number = self[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return number


def runs_of_words(text: str, numbers: dict[str, int] | None = None) -> np.ndarray:
    """The distinct runs of a text as numbers of 32 bits, ascending. A shorter text is one run, and one without any
    words a single word."""
    numbers = _WordHashes() if numbers is None else numbers
    words = WORD.findall(text.lower()) or [text.strip()]
    each = np.fromiter(map(numbers.__getitem__, words), np.uint64, len(words))
    length = min(RUN, len(each))
    count = len(each) - length + 1
    runs = np.zeros(count, np.uint64)
    for place in range(length):
        runs = runs * _STEP + each[place : place + count]
    return np.unique((mix_bits(runs) >> np.uint64(32)).astype(np.uint32))


def find_alike(texts: Iterable[str], threshold: float) -> Iterator[DuplicatePair]:
    """Each document that is at least so alike to a kept one before it, with the most alike of those.

    Raises UsageError where datasketch is not installed.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise UsageError(
            "finding near-duplicates needs datasketch, which is not installed",
            fix="pip install 'thrifty[duplicates]', or leave data.near_duplicates out",
        ) from None
    blank = MinHash(HASHES, seed=1, scheme="affine32", hashfunc=int)
    index, signatures, numbers = MinHashLSH(threshold, HASHES, weights=OVERLOOKING), {}, _WordHashes()
    for number, text in enumerate(texts):
        own = blank.copy()
        runs = runs_of_words(text, numbers)
        for start in range(0, len(runs), 4096):  # as many hashes at a time as a cache holds
            own.update_batch(runs[start : start + 4096].tolist())
        candidates = ((own.jaccard(signatures[key]), -key) for key in index.query(own))
        similarity, key = max(candidates, default=(-1.0, 0))
        if similarity >= threshold:
            yield DuplicatePair(-key, number, similarity)
        else:
            index.insert(number, own, check_duplication=False)
            signatures[number] = own


@dataclass(frozen=True)
class DeduplicatedSource(DocumentSource):
    """The documents of a source without those that are at least so alike to one before."""

    source: DocumentSource
    threshold: float

    @cached_property
    def alike(self) -> tuple[DuplicatePair, ...]:
        return tuple(find_alike(self.source.documents(), self.threshold))

    def documents(self) -> Iterator[str]:
        left_out = {pair.left_out for pair in self.alike}
        return (text for number, text in enumerate(self.source.documents()) if number not in left_out)

    def identity(self) -> str:
        return f"{self.source.identity()} without near-duplicates {METHOD} {self.threshold}"

    def left_out(self) -> str:
        return self.source.left_out()

    def report(self) -> dict[str, Any]:
        """What was left out: how many documents, their bytes, and the least alike of the pairs, by which a person can
        judge the threshold."""
        left_out = {pair.left_out for pair in self.alike}
        shown = heapq.nsmallest(SHOWN, self.alike, key=lambda pair: (pair.similarity, pair.left_out))
        wanted, texts, size = {number for pair in shown for number in (pair.kept, pair.left_out)}, {}, 0
        for number, text in enumerate(self.source.documents()):
            size += len(text.encode()) if number in left_out else 0
            if number in wanted:
                texts[number] = text
        return {
            "threshold": self.threshold,
            "documents": len(left_out),
            "bytes": size,
            "least_alike": [difference(texts[pair.kept], texts[pair.left_out], pair.similarity) for pair in shown],
        }


def difference(kept: str, left_out: str, similarity: float) -> dict[str, Any]:
    """Two texts around the first place at which they differ."""
    shorter = min(len(kept), len(left_out))
    first = next((place for place in range(shorter) if kept[place] != left_out[place]), shorter)
    start = max(0, first - BEFORE)
    excerpts = {"kept": kept[start : start + EXCERPT], "left_out": left_out[start : start + EXCERPT]}
    return {"similarity": similarity, **excerpts}
