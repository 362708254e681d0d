"""Near-duplicate removal by MinHash: leave out documents that share most word 5-grams with an earlier document.

The similarity of two documents is the Jaccard index of their sets of word 5-grams (Broder 1997, On the resemblance
and containment of documents). MinHash estimates the similarity from 128 hashes, with a standard error of 0.035 at 0.8.
Locality-sensitive hashing (package datasketch) finds candidate pairs. It misses about one pair in eight at exactly the
threshold, and one in forty at 0.05 above the threshold. Throughput on Python sources is 10 MB per second and core. Each
kept document requires 6 kB of memory.

A document is compared with kept documents only, so the first document of a group is kept. A pair that is found can
therefore not have one document in training text and the other in held-out text. A document is also compared with
all documents of a held-out file, and with the kept documents of earlier sources of a mixture.
"""

import hashlib
import heapq
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
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
    """A left-out document and the kept document that is most similar to it."""

    kept: int
    left_out: int
    similarity: float
    size: int
    """Bytes of the left-out document."""


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


class KeptDocuments:
    """Signatures of the kept documents of one or several sources. All documents that are read have numbers from 0.

    Raises UsageError if datasketch is not installed, or if a source changes before the next source is added.
    """

    def __init__(self, threshold: float):
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError:
            raise UsageError(
                "near-duplicate removal requires datasketch, which is not installed",
                fix="pip install 'thrifty[duplicates]'; or leave data.near_duplicates out",
            ) from None
        self.threshold = threshold
        self.blank = MinHash(HASHES, seed=1, scheme="affine32", hashfunc=int)
        self.index, self.signatures = MinHashLSH(threshold, HASHES, weights=LSH_WEIGHTS), {}
        self.words, self.count = _WordHashes(), 0
        self.sources: dict[int, tuple[DocumentSource, str]] = {}
        """Each source with its identity, by the number of its first document."""

    def add(self, source: DocumentSource, always: bool = False) -> tuple[DuplicatePair, ...]:
        """Keep the documents of a source. Leave out and return each document that is similar to a kept document by at
        least `threshold`, together with the most similar kept document. With `always`, keep all documents."""
        if any(known.identity() != identity for known, identity in self.sources.values()):
            raise UsageError(
                "a source changed after its texts were compared",
                fix="start again when no process writes to it",
            )
        pairs = []
        self.sources[self.count] = source, source.identity()
        for number, text in enumerate(source.documents(), self.count):
            self.count = number + 1
            own = self.blank.copy()
            runs = runs_of_words(text, self.words)
            for start in range(0, len(runs), 4096):  # hashes of one chunk fit into the processor cache
                own.update_batch(runs[start : start + 4096].tolist())
            candidates = [] if always else self.index.query(own)
            alike = ((own.jaccard(self.signatures[key]), -key) for key in candidates)
            similarity, key = max(alike, default=(-1.0, 0))
            if similarity >= self.threshold:
                pairs.append(DuplicatePair(-key, number, similarity, len(text.encode())))
            else:
                self.index.insert(number, own, check_duplication=False)
                self.signatures[number] = own
        return tuple(pairs)

    def texts(self, numbers: Collection[int]) -> dict[int, str]:
        """Return documents by their numbers. Sources are read only up to the last of these documents."""
        found = {}
        for start, (source, _) in self.sources.items():
            later = [other for other in self.sources if other > start]
            wanted = {number for number in numbers if start <= number < min(later, default=self.count)}
            read = islice(source.documents(), max(wanted) - start + 1) if wanted else ()
            found |= {number: text for number, text in enumerate(read, start) if number in wanted}
        return found


@dataclass(frozen=True)
class DeduplicatedSource(DocumentSource):
    """The documents of a source without near-duplicates of earlier documents."""

    source: DocumentSource
    threshold: float
    earlier: DocumentSource | None = None
    """Source of further earlier documents: a held-out source, or the deduplicated source before it in a mixture."""

    @cached_property
    def _comparison(self) -> tuple[KeptDocuments, int, tuple[DuplicatePair, ...]]:
        """Kept documents of this and all earlier sources, the number of the first own document, and the pairs."""
        if isinstance(self.earlier, DeduplicatedSource):
            kept = self.earlier._comparison[0]
        else:
            kept = KeptDocuments(self.threshold)
            if self.earlier:
                kept.add(self.earlier, always=True)
        return kept, kept.count, kept.add(self.source)

    def documents(self) -> Iterator[str]:
        _, start, alike = self._comparison
        left_out = {pair.left_out for pair in alike}
        return (text for number, text in enumerate(self.source.documents(), start) if number not in left_out)

    def identity(self) -> str:
        earlier = f" of {self.earlier.identity()}" if self.earlier else ""
        return f"{self.source.identity()} without near-duplicates {METHOD} {self.threshold}{earlier}"

    def size(self) -> int:
        return self.source.size()

    def left_out(self) -> str:
        return self.source.left_out()

    def report(self) -> dict[str, Any]:
        """Return number and bytes of left-out documents, and the least similar pairs for a check of the threshold."""
        kept, _, alike = self._comparison
        shown = heapq.nsmallest(SHOWN, alike, key=lambda pair: (pair.similarity, pair.left_out))
        texts = kept.texts({number for pair in shown for number in (pair.kept, pair.left_out)})
        return {
            "threshold": self.threshold,
            "documents": len(alike),
            "bytes": sum(pair.size for pair in alike),
            "least_alike": [difference(texts[pair.kept], texts[pair.left_out], pair.similarity) for pair in shown],
        }


def difference(kept: str, left_out: str, similarity: float) -> dict[str, Any]:
    """Return excerpts of two texts around their first difference."""
    shorter = min(len(kept), len(left_out))
    first = next((index for index in range(shorter) if kept[index] != left_out[index]), shorter)
    start = max(0, first - BEFORE)
    excerpts = {"kept": kept[start : start + EXCERPT], "left_out": left_out[start : start + EXCERPT]}
    return {"similarity": similarity, **excerpts}
