"""Captions of images: tokenized once into a cache folder, and padded to equal length.

train.bin, held_out.bin                 tokens of all captions
train_counts.bin, held_out_counts.bin   int32 (n,), number of captions of each image
train_ends.bin, held_out_ends.bin       int64 (m,), end of each caption
tokenizer.json                          the tokenizer
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.core.tokenizer_files import START_OF_TEXT
from thrifty.data.data_cache import build_folder, file_sha256
from thrifty.data.images.augmentation import PER_PURPOSE, AugmentationDraw
from thrifty.data.pairs.captioned_arrays import captions_file, clean_caption, read_captions
from thrifty.data.prepared_cache import TokenCache, cache_key, open_or_build_tokens, write_manifest
from thrifty.data.text.token_files import token_type
from thrifty.data.tokenizer import TextTokenizer, read_tokenizer, train_tokenizer
from thrifty.data.train_split import DataSplit
from thrifty.kernels.example_rng import random_integers

FORMAT = 1
COUNT, END = np.dtype("<i4"), np.dtype("<i8")
TOGETHER = 4096
"""Number of images whose captions are tokenized in one call."""


def prepare_captions(folder: Path, settings: DataSettings, source: str, say: Callable[[str], None]) -> TokenCache:
    """Return the cached tokens of the captions in a folder.

    Unless the settings name a tokenizer, one is trained on the training captions.
    """
    file = Path(settings.tokenizer).expanduser() if settings.tokenizer else None
    if file is None:
        tokenizer = f"trained {settings.vocabulary}"
    else:
        tokenizer = file_sha256(file) if file.is_file() else ""
    texts = [file_sha256(folder / captions_file(part)) for part in DataSplit]
    key = cache_key("captions", FORMAT, tokenizer, *texts)
    vocabulary = settings.vocabulary
    return open_or_build_tokens(key, f"{source}'s captions", lambda into: _build(folder, file, vocabulary, into), say)


def _build(folder: Path, file: Path | None, vocabulary: int, into: Path) -> None:
    if file is not None:
        tokenizer = read_tokenizer(file)
    else:
        texts = (text for own in read_captions(folder, DataSplit.TRAIN) for text in own)
        tokenizer = train_tokenizer(texts, vocabulary)
    with build_folder(into) as temporary:
        tokenizer.save(temporary)
        counts = {part: _write(read_captions(folder, part), tokenizer, temporary, part) for part in DataSplit}
        about = {"format": FORMAT, "type": token_type(tokenizer), "vocabulary": tokenizer.vocabulary}
        write_manifest(temporary, {**about, "captions": counts})


def _write(captions: Iterator[list[str]], tokenizer: TextTokenizer, folder: Path, part: DataSplit) -> int:
    """Write the files of a part and return the number of captions."""
    counts, ends, end = [], [], 0
    with (folder / f"{part}.bin").open("wb") as file:
        while group := list(islice(captions, TOGETHER)):
            counts += map(len, group)
            for tokens in tokenizer.encode_batch([text for own in group for text in own]):
                file.write(np.array(tokens, token_type(tokenizer)).tobytes())
                end += len(tokens)
                ends.append(end)
    (folder / f"{part}_counts.bin").write_bytes(np.array(counts, COUNT).tobytes())
    (folder / f"{part}_ends.bin").write_bytes(np.array(ends, END).tobytes())
    return len(ends)


@dataclass(frozen=True)
class CaptionRows:
    """Captions of the training or held-out images, as rows of `length` tokens with random access."""

    tokens: np.ndarray
    """Tokens of all captions in sequence."""
    firsts: np.ndarray
    """Index of the first caption of each image (n,)."""
    counts: np.ndarray
    """Number of captions of each image (n,), at least one."""
    ends: np.ndarray
    """Index after the last token of each caption (m,)."""
    tokenizer: TextTokenizer
    length: int

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each caption (m,)."""
        return np.diff(self.ends, prepend=0)

    @property
    def cut(self) -> float:
        """Fraction of captions that are cut, because they are longer than a row."""
        return float((self.sizes > caption_length(self.tokenizer, self.length)).mean())

    def captions_of(self, image: int) -> list[str]:
        """Return all captions of an image, decoded from their tokens."""
        numbers = range(self.firsts[image], self.firsts[image] + self.counts[image])
        begins = (self.ends[number - 1] if number else 0 for number in numbers)
        rows = (self.tokens[begin : self.ends[number]] for begin, number in zip(begins, numbers, strict=True))
        return [self.tokenizer.decode(row.tolist()) for row in rows]

    def fields(self, indices: np.ndarray, keys: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return one caption per image: {"tokens": int64 (b, length), "keep": bool (b, length)}.

        The caption is the first of the image; with `keys` uint64 (b,), it is random and seeded by the key.
        """
        chosen = self.firsts[indices]
        if keys is not None:
            numbers = random_integers(keys, 1, skip=PER_PURPOSE * AugmentationDraw.CAPTION)[:, 0]
            chosen = chosen + (numbers % self.counts[indices].astype(np.uint64)).astype(np.int64)
        begins = np.where(chosen > 0, self.ends[chosen - 1], 0)
        return _rows(self.tokens, begins, self.ends[chosen] - begins, self.tokenizer, self.length)


def open_captions(prepared: TokenCache, part: DataSplit, length: int) -> CaptionRows:
    counts = np.fromfile(prepared.folder / f"{part}_counts.bin", COUNT)
    ends = np.fromfile(prepared.folder / f"{part}_ends.bin", END)
    tokens = prepared.tokens(part) if ends[-1] else np.zeros(0, prepared.manifest["type"])
    firsts = np.cumsum(counts) - counts
    return CaptionRows(tokens, firsts, counts, ends, prepared.tokenizer, length)


def caption_rows(texts: list[str], tokenizer: TextTokenizer, length: int) -> dict[str, Tensor]:
    """Tokenize captions, and pad them to rows of `length` tokens as in training."""
    encoded = [np.array(tokens, np.int64) for tokens in tokenizer.encode_batch([clean_caption(text) for text in texts])]
    sizes = np.array([len(tokens) for tokens in encoded], np.int64)
    return _rows(np.concatenate([*encoded, np.zeros(0, np.int64)]), np.cumsum(sizes) - sizes, sizes, tokenizer, length)


def caption_length(tokenizer: TextTokenizer, length: int) -> int:
    """Return the maximum number of caption tokens in a row. Raises UsageError if no token fits."""
    left = length - 1 - (_start(tokenizer) is not None)
    if left < 1:
        raise UsageError(f"data.length is {length}, too short for a caption", fix="--set data.length=32")
    return left


def _start(tokenizer: TextTokenizer) -> int | None:
    return tokenizer.inner.token_to_id(START_OF_TEXT)


def _rows(
    tokens: np.ndarray, begins: np.ndarray, sizes: np.ndarray, tokenizer: TextTokenizer, length: int
) -> dict[str, Tensor]:
    """Return rows of captions. `begins` and `sizes` (b,) are positions and lengths in the stream `tokens`.

    A row consists of the start of text (if the tokenizer has one), the caption, and end-of-text tokens as padding. Long
    captions are cut.
    """
    start, end = _start(tokenizer), tokenizer.end_of_text
    sizes = np.minimum(sizes, caption_length(tokenizer, length))
    before = 0 if start is None else 1
    offsets = np.arange(length) - before
    inside = (offsets >= 0) & (offsets < sizes[:, None])
    places = np.where(inside, begins[:, None] + offsets, 0)
    rows = np.full(inside.shape, end, np.int64)
    rows[inside] = tokens[places[inside]]
    if start is not None:
        rows[:, 0] = start
    return {"tokens": torch.from_numpy(rows), "keep": torch.from_numpy(offsets <= sizes[:, None])}
