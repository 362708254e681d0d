"""Summarize a source of images with captions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from thrifty.core.recipe import DataSettings
from thrifty.data.images.image_inspection import FOLDER_SIDE
from thrifty.data.pairs.caption_rows import caption_length
from thrifty.data.pairs.pair_data import open_image_pairs
from thrifty.data.train_split import DataSplit
from thrifty.kernels.keyed_permutation import permute


@dataclass(frozen=True)
class PairSummary:
    """Counts are by part: "train" and "held_out"; what is said of captions is of those to train on."""

    source: str
    side: int
    channels: int
    images: dict[str, int]
    captions: dict[str, int]
    mean: list[float]
    std: list[float]
    vocabulary: int
    length: int
    """Tokens of a caption that an example has room for."""
    tokens_per_caption: float
    longest: int
    cut: float
    """The share of captions that are longer."""
    left_out: dict[str, int]
    """How many files or rows are left out, by the reason."""
    named: list[str]
    examples: list[list[str]]
    """The captions of some training images, as tokens say them."""


def inspect_pairs(settings: DataSettings, examples: int, say: Callable[[str], None]) -> PairSummary:
    """Prepare a source of images with captions if need be and describe it. Raises UsageError as `open_image_pairs`
    does."""
    data = open_image_pairs(replace(settings, batch=1), 0, FOLDER_SIDE, say)
    train, ends = data.parts[DataSplit.TRAIN], data.ends.images
    sizes = train.captions.sizes
    chosen = permute(np.arange(min(examples, len(train))), len(train), 0)
    return PairSummary(
        source=settings.source,
        side=ends.side,
        channels=ends.channels,
        images={part: len(own) for part, own in data.parts.items()},
        captions={part: len(own.captions.ends) for part, own in data.parts.items()},
        mean=list(ends.mean),
        std=list(ends.std),
        vocabulary=data.ends.text.vocabulary,
        length=caption_length(data.tokenizer, settings.length),
        tokens_per_caption=float(sizes.mean()),
        longest=int(sizes.max()),
        cut=train.captions.cut,
        left_out=dict(data.left_out),
        named=list(data.named),
        examples=[train.captions.said(int(place)) for place in chosen],
    )
