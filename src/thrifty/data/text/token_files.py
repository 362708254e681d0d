"""Tokens written to a file: all documents one after the other, each piece of them followed by the end of text."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.data.tokenizer import TextTokenizer
from thrifty.data.train_split import DataSplit

AT_ONCE = 1_000_000
"""Characters tokenised together."""


class TokenFile:
    """A file of tokens being written, with what is counted on the way.

    The last piece of a document is what is to be predicted: the document itself, or the target of a pair. Counts are of
    those pieces.
    """

    def __init__(self, path: Path, tokenizer: TextTokenizer):
        self.file = path.open("wb")
        self.end_of_text = tokenizer.end_of_text
        self.type = token_type(tokenizer)
        self.counts = np.zeros(tokenizer.vocabulary, dtype=np.int64)
        self.documents = self.bytes = 0

    def add(self, documents: Sequence[Sequence[str]], encoded: Sequence[list[int]]) -> None:
        """Append documents in pieces, and the tokens of every piece."""
        ended = ((*tokens, self.end_of_text) for tokens in encoded)
        numbers = np.fromiter((token for tokens in ended for token in tokens), dtype=self.type)
        self.file.write(numbers.tobytes())
        predicted = numbers
        if len(encoded) > len(documents):
            self._refuse_spelt_ends(numbers, len(encoded))
            is_last = [place == len(document) - 1 for document in documents for place in range(len(document))]
            predicted = numbers[np.repeat(is_last, [len(tokens) + 1 for tokens in encoded])]
        self.counts += np.bincount(predicted, minlength=len(self.counts))
        self.documents += len(documents)
        self.bytes += sum(len(document[-1].encode()) for document in documents)

    def _refuse_spelt_ends(self, numbers: np.ndarray, pieces: int) -> None:
        if np.count_nonzero(numbers == self.end_of_text) != pieces:
            raise UsageError(
                "a text holds the tokenizer's end of text, by which pairs are told apart",
                fix="remove it from the text, or leave data.tokenizer out so that one is trained",
            )

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def write_streams(
    parts: Iterator[tuple[DataSplit, str]], pieces: Callable[[str], list[str]], tokenizer: TextTokenizer, folder: Path
) -> dict[DataSplit, TokenFile]:
    """The documents of each part, tokenised piece by piece, as PART.bin in a folder."""
    streams = {part: TokenFile(folder / f"{part}.bin", tokenizer) for part in DataSplit}
    try:
        for group in _groups(parts):
            for part, stream in streams.items():
                documents = [pieces(text) for belongs, text in group if belongs is part]
                stream.add(documents, tokenizer.encode_batch([piece for each in documents for piece in each]))
    finally:
        for stream in streams.values():
            stream.file.close()
    return streams


def _groups(parts: Iterator[tuple[DataSplit, str]]) -> Iterator[list[tuple[DataSplit, str]]]:
    """Consecutive documents, together at least AT_ONCE characters."""
    for first in parts:
        group, size = [first], len(first[1])
        while size < AT_ONCE and (following := next(parts, None)):
            group.append(following)
            size += len(following[1])
        yield group


def token_type(tokenizer: TextTokenizer) -> str:
    return "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"


def unigram_entropy(train: np.ndarray, held_out: np.ndarray) -> float:
    """Nats per held-out token under the training frequencies, each count raised by one (Laplace 1812)."""
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * log_probability).sum() / held_out.sum())
