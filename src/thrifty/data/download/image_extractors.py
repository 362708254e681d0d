"""Extractors of labelled images from members of packages, one function per known data set.

Each function takes the contents of members by name. It returns the names of the labels, and every image with part and
label. Code of packages is never run.
"""

import gzip
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from thrifty.core.errors import IntegrityError
from thrifty.data.images.digits import DIGITS
from thrifty.data.images.image_decoding import pillow
from thrifty.data.train_split import DataSplit

Image = tuple[DataSplit, np.ndarray, int]
"""Part of the split, pixels uint8 (c, h, w) and label number of an image."""


class ImageSet(NamedTuple):
    """Label names, and an iterator over all images."""

    labels: tuple[str, ...]
    images: Iterator[Image]


CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def cifar10(members: Mapping[str, bytes]) -> ImageSet:
    """Return the images of six PNG files and two JSON lists of labels. Each row of a file is one 32 x 32 x 3 image."""
    batches = {
        DataSplit.TRAIN: [f"data_batch_{number}.png" for number in range(1, 6)],
        DataSplit.HELD_OUT: ["test_batch.png"],
    }
    lists = {DataSplit.TRAIN: "train_lables.json", DataSplit.HELD_OUT: "test_lables.json"}

    def images() -> Iterator[Image]:
        for part, names in batches.items():
            labels = iter(json.loads(members[lists[part]]))
            for name in names:
                rows = png_rows(members[name]).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
                for pixels in rows:
                    yield part, pixels, next(labels)

    return ImageSet(CIFAR10, images())


def fashion_mnist(members: Mapping[str, bytes]) -> ImageSet:
    return ImageSet(FASHION, _mnist({name.removesuffix(".gz"): gzip.decompress(raw) for name, raw in members.items()}))


def mnist(members: Mapping[str, bytes]) -> ImageSet:
    return ImageSet(DIGITS, _mnist(members))


def _mnist(members: Mapping[str, bytes]) -> Iterator[Image]:
    for part, prefix in ((DataSplit.TRAIN, "train"), (DataSplit.HELD_OUT, "t10k")):
        pixels = idx_array(members[f"{prefix}-images-idx3-ubyte"])
        labels = idx_array(members[f"{prefix}-labels-idx1-ubyte"])
        for image, label in zip(pixels, labels, strict=True):
            yield part, image[None], int(label)


def idx_array(content: bytes) -> np.ndarray:
    """Return an array of bytes in MNIST's IDX format.

    A file consists of a magic number whose last byte is the number of dims, the sizes of the dims, and the data. Raises
    IntegrityError for any other content.
    """
    dims = content[3] if content[:3] == b"\x00\x00\x08" and len(content) > 3 else 0
    sizes = np.frombuffer(content[4 : 4 + 4 * dims], ">u4")
    data = np.frombuffer(content[4 + 4 * dims :], np.uint8)
    if not dims or len(data) != sizes.prod():
        raise IntegrityError(
            "a file is not an array of bytes in the IDX format", fix="use the pinned version of the package"
        )
    return data.reshape(sizes)


def png_rows(content: bytes) -> np.ndarray:
    """Return the pixels (h, w, 3) of a PNG file. Its size is not limited, because its sha256 is pinned."""
    from io import BytesIO

    image = pillow()
    limit, image.MAX_IMAGE_PIXELS = image.MAX_IMAGE_PIXELS, None
    try:
        with image.open(BytesIO(content), formats=["PNG"]) as opened:
            return np.asarray(opened.convert("RGB"))
    finally:
        image.MAX_IMAGE_PIXELS = limit
