"""Summary of an image source before training, for `thrifty data look`."""

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
"""Default side in pixels of a folder's images, if neither the settings nor a model determines it."""


@dataclass(frozen=True)
class ImageSummary:
    """Summary of an image source, with counts by part ("train" and "held_out")."""

    source: str
    side: int
    channels: int
    images: dict[str, int]
    labels: dict[str, dict[str, int]]
    """Number of images of each label by part; empty without labels."""
    mean: list[float]
    std: list[float]
    """Standard deviation of each channel of the training images, for pixels in 0 … 1."""
    label_entropy: float | None
    """Cross-entropy of held-out labels under the training frequencies, in nats per image."""
    unlabelled: str
    """Reason why there are no labels; empty for labelled images."""
    left_out: int
    named: list[str]
    """Names of the first thousand unreadable files, with the reasons."""


def inspect_images(settings: DataSettings, say: Callable[[str], None]) -> ImageSummary:
    """Return the summary of a source. Decode images first if necessary. Raises UsageError like `open_images`."""
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
    """Return the reason why there are no labels, or an empty string for labelled images."""
    if source == DIGITS or source in entries():
        return ""
    try:
        image_files(Path(source).expanduser())
    except UsageError as error:
        return error.what
    return ""
