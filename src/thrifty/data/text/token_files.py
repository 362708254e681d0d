"""Files with the tokens of all documents in sequence. An end-of-text token ends each text, and each half of a pair."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.data.tokenizer import TextTokenizer
from thrifty.data.train_split import DataSplit

AT_ONCE = 1_000_000
"""Number of characters that are tokenized in one call."""


class TokenFile:
    """A file of tokens that is being written, with counts.

    A model predicts the last piece of a document: the document itself, or the target of a pair. Only last pieces are
    counted.
    """

    def __init__(self, path: Path, tokenizer: TextTokenizer):
        self.file = path.open("wb")
        self.end_of_text = tokenizer.end_of_text
        self.type = token_type(tokenizer)
        self.counts = np.zeros(tokenizer.vocabulary, dtype=np.int64)
        self.documents = self.bytes = 0

    def add(self, documents: Sequence[Sequence[str]], encoded: Sequence[list[int]]) -> None:
        """Append the tokens of documents. `encoded` has the tokens of each piece, in order."""
        ended = ((*tokens, self.end_of_text) for tokens in encoded)
        numbers = np.fromiter((token for tokens in ended for token in tokens), dtype=self.type)
        self.file.write(numbers.tobytes())
        predicted = numbers
        if len(encoded) > len(documents):
            self._check_ends(numbers, len(encoded))
            is_last = [index == len(document) - 1 for document in documents for index in range(len(document))]
            predicted = numbers[np.repeat(is_last, [len(tokens) + 1 for tokens in encoded])]
        self.counts += np.bincount(predicted, minlength=len(self.counts))
        self.documents += len(documents)
        self.bytes += sum(len(document[-1].encode()) for document in documents)

    def _check_ends(self, numbers: np.ndarray, pieces: int) -> None:
        if np.count_nonzero(numbers == self.end_of_text) != pieces:
            raise UsageError(
                "a text contains the tokenizer's end-of-text token, which separates texts",
                fix="remove it from the text; or leave data.tokenizer out to train a tokenizer",
            )

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())


def write_streams(
    parts: Iterator[tuple[DataSplit, str]], pieces: Callable[[str], list[str]], tokenizer: TextTokenizer, folder: Path
) -> dict[DataSplit, TokenFile]:
    """Tokenize the pieces of all documents, write each part to PART.bin in a folder, and return the counts."""
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
    """Yield groups of consecutive documents. Except the last, a group has at least AT_ONCE characters."""
    for first in parts:
        group, size = [first], len(first[1])
        while size < AT_ONCE and (following := next(parts, None)):
            group.append(following)
            size += len(following[1])
        yield group


def token_type(tokenizer: TextTokenizer) -> str:
    return "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"


def unigram_entropy(train: np.ndarray, held_out: np.ndarray) -> float:
    """Return the cross-entropy of held-out tokens in nats per token, for counts (v,) of v tokens.

    Probabilities are training frequencies with add-one smoothing (Laplace 1812).
    """
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(held_out * log_probability).sum() / held_out.sum())
