"""`thrifty data look`: what a source holds, before anything is trained on it."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from thrifty.core.recipe import DataSettings
from thrifty.data.documents import open_source
from thrifty.data.images import open_images
from thrifty.data.packing import Windows
from thrifty.data.permutation import permuted
from thrifty.data.prepare import prepare
from thrifty.data.splitting import Part


@dataclass(frozen=True)
class Lengths:
    """How many documents have at least `low` and fewer than `high` tokens."""

    low: int
    high: int
    documents: int


@dataclass(frozen=True)
class Look:
    """Counts are by part: "train" and "held_out"."""

    source: str
    folder: str
    split: str
    documents: dict[str, int]
    bytes: dict[str, int]
    tokens: dict[str, int]
    vocabulary: int
    bytes_per_token: float
    unigram_entropy: float
    """Nats per held-out token under the training frequencies of single tokens."""
    duplicates: float
    """Share of documents whose exact text came before."""
    lengths: list[Lengths]
    examples: list[str]
    """Decoded training examples, as a model would see them."""


@dataclass(frozen=True)
class ImageLook:
    """Counts are by part: "train" and "held_out"."""

    source: str
    side: int
    channels: int
    images: dict[str, int]
    labels: dict[str, dict[str, int]]
    """How many images of each label there are, by part."""
    mean: list[float]
    std: list[float]
    """Of each channel of the training images, pixels being 0 … 1."""
    label_entropy: float
    """Nats per held-out image for who answers by how frequent each label is in training."""
    left_out: int
    named: list[str]
    """The first of the files that cannot be read, with the reasons."""


FOLDER_SIDE = 64
"""Pixels to which the images of a folder are scaled where no size is given, and no model says one."""


def look_at_images(settings: DataSettings, say: Callable[[str], None]) -> ImageLook:
    """Prepare a source of images if need be and describe it. Raises UsageError as `open_images` does."""
    data = open_images(replace(settings, batch=1), 0, FOLDER_SIDE, say)
    names = data.ends.labels
    counts = {part: np.bincount(arrays.labels, minlength=len(names)).tolist() for part, arrays in data.parts.items()}
    return ImageLook(
        source=settings.source,
        side=data.ends.side,
        channels=data.ends.channels,
        images={part: len(arrays) for part, arrays in data.parts.items()},
        labels={part: dict(zip(names, own, strict=True)) for part, own in counts.items()},
        mean=list(data.ends.mean),
        std=list(data.ends.std),
        label_entropy=data.frequencies_entropy,
        left_out=data.left_out,
        named=list(data.named),
    )


def look(settings: DataSettings, examples: int, say: Callable[[str], None]) -> Look:
    """Prepare the source if need be and describe it. Raises UsageError as `open_data` does."""
    prepared = prepare(settings, say)
    manifest, tokenizer = prepared.manifest, prepared.tokenizer
    train = prepared.tokens(Part.TRAIN)
    windows = Windows(train, min(settings.length, len(train) - 1))
    chosen = permuted(np.arange(min(examples, len(windows))), len(windows), 0)
    lengths = [document_lengths(prepared.tokens(part), tokenizer.end_of_text) for part in Part]
    return Look(
        source=settings.source,
        folder=str(prepared.folder),
        split=manifest["split"],
        documents=manifest["documents"],
        bytes=manifest["bytes"],
        tokens=manifest["tokens"],
        vocabulary=manifest["vocabulary"],
        bytes_per_token=manifest["bytes_per_token"],
        unigram_entropy=manifest["unigram_entropy"],
        duplicates=_duplicates(settings),
        lengths=histogram(np.concatenate(lengths)),
        examples=[tokenizer.decode(window.tolist()) for window in windows.at(chosen)],
    )


def document_lengths(tokens: np.ndarray, end_of_text: int) -> np.ndarray:
    """Tokens of each document in a stream, its end of text not counted."""
    return np.diff(np.flatnonzero(tokens == end_of_text), prepend=-1) - 1


def histogram(lengths: np.ndarray) -> list[Lengths]:
    """Counted between powers of two, from the shortest to the longest."""
    powers = np.frexp(lengths)[1]  # a length of 2^(p-1) … 2^p - 1 has power p; 0 has power 0
    counts = np.bincount(powers)
    first = int(np.flatnonzero(counts)[0])
    return [Lengths((1 << p) // 2, 1 << p, int(counts[p])) for p in range(first, len(counts))]


def _duplicates(settings: DataSettings) -> float:
    texts = open_source(settings.source, settings.column).documents()
    digests = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
    return 1 - len(set(digests)) / len(digests)
