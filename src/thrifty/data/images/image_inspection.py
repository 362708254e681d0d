"""What `thrifty data look` finds out about images, before anything is trained on them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.core.recipe import DataSettings
from thrifty.data.catalogue import entries
from thrifty.data.images.image_data import DIGITS, open_images
from thrifty.data.images.image_folder import image_files

FOLDER_SIDE = 64
"""Pixels to which the images of a folder are scaled where no size is given, and no model says one."""


@dataclass(frozen=True)
class ImageSummary:
    """Counts are by part: "train" and "held_out"."""

    source: str
    side: int
    channels: int
    images: dict[str, int]
    labels: dict[str, dict[str, int]]
    """How many images of each label there are, by part; empty without labels."""
    mean: list[float]
    std: list[float]
    """Of each channel of the training images, pixels being 0 … 1."""
    label_entropy: float | None
    """Nats per held-out image for who answers by how frequent each label is in training."""
    unlabelled: str
    """Why nothing can be learned of labels, where that is so."""
    left_out: int
    named: list[str]
    """The files that cannot be read, the first thousand, with the reasons."""


def inspect_images(settings: DataSettings, say: Callable[[str], None]) -> ImageSummary:
    """Prepare a source of images if need be and describe it. Raises UsageError as `open_images` does."""
    unlabelled = _unlabelled(settings.source)
    data = open_images(replace(settings, batch=1), 0, FOLDER_SIDE, say, labelled=not unlabelled)
    names = data.ends.labels
    counts = {part: np.bincount(arrays.labels, minlength=len(names)).tolist() for part, arrays in data.parts.items()}
    return ImageSummary(
        source=settings.source,
        side=data.ends.side,
        channels=data.ends.channels,
        images={part: len(arrays) for part, arrays in data.parts.items()},
        labels={part: dict(zip(names, own, strict=True)) for part, own in counts.items()} if names else {},
        mean=list(data.ends.mean),
        std=list(data.ends.std),
        label_entropy=data.frequencies_entropy,
        unlabelled=unlabelled,
        left_out=data.left_out,
        named=list(data.named),
    )


def _unlabelled(source: str) -> str:
    """Why images have no labels; nothing where they have some."""
    if source == DIGITS or source in entries():
        return ""
    try:
        image_files(Path(source).expanduser())
    except UsageError as error:
        return error.what
    return ""
