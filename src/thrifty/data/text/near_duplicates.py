"""Near-duplicate removal by MinHash: leave out documents that share most word 5-grams with an earlier document.

The similarity of two documents is the Jaccard index of their sets of word 5-grams (Broder 1997, On the resemblance
and containment of documents). MinHash estimates the similarity from 128 hashes, with a standard error of 0.035 at 0.8.
Locality-sensitive hashing (package datasketch) finds candidate pairs. It misses about one pair in eight at exactly the
threshold, and one in forty at 0.05 above the threshold. Throughput on Python sources is 10 MB per second and core. Each
kept document requires 6 kB of memory.

A document is compared with kept documents only, so the first document of a group is kept. A pair that is found can
therefore not have one document in training text and the other in held-out text. A document is also compared with
all documents of a held-out file, and of earlier sources of a mixture.
"""

import hashlib
import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.data.text.document_sources import DocumentSource
from thrifty.kernels.keyed_permutation import mix_bits

RUN = 5
"""Number of consecutive words in an n-gram."""
HASHES = 128
"""Number of MinHash values of a document."""
LSH_WEIGHTS = (0.1, 0.9)
"""Costs of false candidates and missed pairs. False candidates cost little, because later comparisons remove them."""
METHOD = 1
"""Version of the method. Increase it when a code change alters which documents are left out."""
SHOWN, EXCERPT, BEFORE = 5, 160, 40
"""Number of reported pairs, characters of each excerpt, and characters before the first difference."""
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")
"""A word of letters and digits, or one character of a script without spaces."""
KNOWN_WORDS = 1_000_000
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class DuplicatePair:
    """Numbers of a kept document and of a left-out document in the source, from 0. Documents of other sources have the
    numbers -1, -2, …"""

    kept: int
    left_out: int
    similarity: float


class _WordHashes(dict[str, int]):
    """Cache of a 64-bit hash of each word, the same on every machine."""

    def __missing__(self, word: str) -> int:
        if len(self) >= KNOWN_WORDS:
            self.clear()
        number = self[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        return number


def runs_of_words(text: str, numbers: dict[str, int] | None = None) -> np.ndarray:
    """Return the distinct n-grams of a text as 32-bit hashes, ascending.

    A text of fewer than 5 words is one n-gram. A text without words counts as one word.
    """
    numbers = _WordHashes() if numbers is None else numbers
    words = WORD.findall(text.lower()) or [text.strip()]
    each = np.fromiter(map(numbers.__getitem__, words), np.uint64, len(words))
    length = min(RUN, len(each))
    count = len(each) - length + 1
    runs = np.zeros(count, np.uint64)
    for index in range(length):
        runs = runs * _STEP + each[index : index + count]
    return np.unique((mix_bits(runs) >> np.uint64(32)).astype(np.uint32))


def find_alike(texts: Iterable[str], threshold: float, known: Iterable[str] = ()) -> Iterator[DuplicatePair]:
    """Yield each document that is similar to a kept document by at least `threshold`, together with the most similar
    kept document.

    The documents `known` are kept before all others, also if they are similar to each other. Raises UsageError if
    datasketch is not installed.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise UsageError(
            "near-duplicate removal requires datasketch, which is not installed",
            fix="pip install 'thrifty[duplicates]'; or leave data.near_duplicates out",
        ) from None
    blank = MinHash(HASHES, seed=1, scheme="affine32", hashfunc=int)
    index, signatures, numbers = MinHashLSH(threshold, HASHES, weights=LSH_WEIGHTS), {}, _WordHashes()
    for number, text in chain(_numbered_below_0(known), enumerate(texts)):
        own = blank.copy()
        runs = runs_of_words(text, numbers)
        for start in range(0, len(runs), 4096):  # hashes of one chunk fit into the processor cache
            own.update_batch(runs[start : start + 4096].tolist())
        candidates = ((own.jaccard(signatures[key]), -key) for key in index.query(own))
        similarity, key = max(candidates, default=(-1.0, 0))
        if similarity >= threshold and number >= 0:
            yield DuplicatePair(-key, number, similarity)
        else:
            index.insert(number, own, check_duplication=False)
            signatures[number] = own


def _numbered_below_0(texts: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((-number, text) for number, text in enumerate(texts, start=1))


@dataclass(frozen=True)
class DeduplicatedSource(DocumentSource):
    """The documents of a source without near-duplicates of earlier documents and of the sources `known`."""

    source: DocumentSource
    threshold: float
    known: tuple[DocumentSource, ...] = ()

    @cached_property
    def alike(self) -> tuple[DuplicatePair, ...]:
        return tuple(find_alike(self.source.documents(), self.threshold, self._known_documents()))

    def documents(self) -> Iterator[str]:
        left_out = {pair.left_out for pair in self.alike}
        return (text for number, text in enumerate(self.source.documents()) if number not in left_out)

    def identity(self) -> str:
        known = "".join(f" of {source.identity()}" for source in self.known)
        return f"{self.source.identity()} without near-duplicates {METHOD} {self.threshold}{known}"

    def size(self) -> int:
        return self.source.size()

    def left_out(self) -> str:
        return self.source.left_out()

    def report(self) -> dict[str, Any]:
        """Return number and bytes of left-out documents, and the least similar pairs for a check of the threshold."""
        left_out = {pair.left_out for pair in self.alike}
        shown = heapq.nsmallest(SHOWN, self.alike, key=lambda pair: (pair.similarity, pair.left_out))
        wanted, texts, size = {number for pair in shown for number in (pair.kept, pair.left_out)}, {}, 0
        for number, text in chain(_numbered_below_0(self._known_documents()), enumerate(self.source.documents())):
            size += len(text.encode()) if number in left_out else 0
            if number in wanted:
                texts[number] = text
        return {
            "threshold": self.threshold,
            "documents": len(left_out),
            "bytes": size,
            "least_alike": [difference(texts[pair.kept], texts[pair.left_out], pair.similarity) for pair in shown],
        }

    def _known_documents(self) -> Iterator[str]:
        return chain.from_iterable(source.documents() for source in self.known)


def difference(kept: str, left_out: str, similarity: float) -> dict[str, Any]:
    """Return excerpts of two texts around their first difference."""
    shorter = min(len(kept), len(left_out))
    first = next((index for index in range(shorter) if kept[index] != left_out[index]), shorter)
    start = max(0, first - BEFORE)
    excerpts = {"kept": kept[start : start + EXCERPT], "left_out": left_out[start : start + EXCERPT]}
    return {"similarity": similarity, **excerpts}
