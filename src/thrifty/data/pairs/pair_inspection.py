"""Summary of a source of images with captions."""

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
    """Summary of a source, with counts by part ("train" and "held_out") and statistics of training captions."""

    source: str
    side: int
    channels: int
    images: dict[str, int]
    captions: dict[str, int]
    mean: list[float]
    std: list[float]
    vocabulary: int
    length: int
    """Maximum number of caption tokens in an example."""
    tokens_per_caption: float
    longest: int
    cut: float
    """Fraction of captions that are longer than `length` and are cut."""
    left_out: dict[str, int]
    """Number of left-out files or rows by reason."""
    named: list[str]
    examples: list[list[str]]
    """Captions of some training images, decoded from their tokens."""


def inspect_pairs(settings: DataSettings, examples: int, say: Callable[[str], None]) -> PairSummary:
    """Return the summary of a source of images with captions. Prepare the source first if necessary.

    Raises UsageError like `open_image_pairs`.
    """
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
        examples=[train.captions.captions_of(int(image)) for image in chosen],
    )
