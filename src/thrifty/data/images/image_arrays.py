"""Image arrays: a folder with the memory-mapped pixels and labels of each part.

train.bin, held_out.bin                 pixels, uint8 (n, c, h, w)
train_labels.bin, held_out_labels.bin   int32 (n,)
train_names.json, held_out_names.json   names of the image files, if each image has its own file
images.json                             shape and number of images, names of labels, mean and standard deviation of
                                        training pixels, and the source of the pixels
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import ExampleIndex
from thrifty.core.errors import IntegrityError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.recipe import AugmentationSettings
from thrifty.data.epoch_sampler import fingerprint
from thrifty.data.images.augmentation import augment, crop_and_flip
from thrifty.data.train_split import DataSplit
from thrifty.kernels.image_resizing import resize

IMAGES = "images.json"
BRIGHTEST = 255
LABEL = np.dtype("<i4")


def normalized(images: Tensor, ends: ImageModelSpec) -> Tensor:
    """Standardize images (b, c, h, w), whose pixels are in 0 … 1, by the channel means and standard deviations in
    `ends`."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (ends.mean, ends.std))
    return images.sub(mean).div_(std)


def denormalized(images: Tensor, ends: ImageModelSpec) -> Tensor:
    """Invert `normalized`: return images (b, c, h, w) in 0 … 1."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (ends.mean, ends.std))
    return images.mul(std).add_(mean)


@dataclass(frozen=True)
class ImageArrays:
    """The images of the training or held-out part, as `IndexedExamples`."""

    pixels: np.ndarray
    """Pixels from 0 to `brightest`, uint8 (n, c, h, w)."""
    labels: np.ndarray
    ends: ImageModelSpec
    """Description of model inputs. Images are resized to its `side` if they have another size."""
    brightest: int = BRIGHTEST
    names: Sequence[str] = ()
    """Names of the image files; empty unless each image has its own file."""

    def __len__(self) -> int:
        return len(self.labels)

    def shown(self, indices: np.ndarray) -> Tensor:
        """Return the images at `indices` without augmentation, float32 (b, c, side, side) in 0 … 1."""
        return self._scaled(self._stored(indices))

    def changed(self, indices: np.ndarray, keys: np.ndarray, how: AugmentationSettings) -> Tensor:
        """Return augmented images in 0 … 1. Keys uint64 (b,) seed the random values, see `augmentation.augment`."""
        pixels = self._stored(indices)
        if pixels.shape[-1] == self.ends.side and (how.crop or how.flip):  # the result is equal, and bytes are faster
            pixels, how = crop_and_flip(pixels, keys, how.crop, how.flip), replace(how, crop=0, flip=False)
        return augment(self._scaled(pixels), keys, how, self.ends.mean)

    def _stored(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.pixels[indices]))

    def _scaled(self, pixels: Tensor) -> Tensor:
        return resize(pixels.float().div_(self.brightest), self.ends.side, self.ends.side)

    def labels_of(self, indices: np.ndarray) -> Tensor:
        """Return labels, int64 (b,)."""
        return torch.from_numpy(self.labels[indices].astype(np.int64))

    def example_index(self) -> ExampleIndex:
        """Return the index of the stored images. Resizing does not change the index."""
        labels = self.labels_of(np.arange(len(self))) if self.ends.labels else None
        return ExampleIndex(len(self), self._fingerprint, labels, self.ends.labels)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.pixels, *([self.labels] if self.ends.labels else []), also=self.ends.labels)

    def unlabelled(self) -> "ImageArrays":
        """Return a copy without labels."""
        return replace(self, ends=replace(self.ends, labels=()))

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return {"inputs": (b, c, side, side)}, and "labels" (b,) if images have labels."""
        labels = {"labels": self.labels_of(indices)} if self.ends.labels else {}
        return {"inputs": normalized(self.shown(indices), self.ends), **labels}


def names_file(part: DataSplit) -> str:
    return f"{part}_names.json"


@dataclass
class ChannelStatistics:
    """Exact mean and standard deviation per channel of a stream of images, from integer sums."""

    count: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def add(self, pixels: np.ndarray) -> None:
        """Add one image (c, h, w)."""
        flat = pixels.reshape(len(pixels), -1).astype(np.int64)
        self.count += flat.shape[1]
        self.sums, self.squares = self.sums + flat.sum(1), self.squares + (flat * flat).sum(1)

    def statistics(self, brightest: int = BRIGHTEST) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and standard deviation per channel, for pixels in 0 … 1. A constant channel has deviation 1."""
        mean = self.sums / self.count
        std = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
        return tuple((mean / brightest).tolist()), tuple((np.where(std > 0, std, brightest) / brightest).tolist())


def write_arrays(
    folder: Path, labels: Sequence[str], images: Iterable[tuple[DataSplit, np.ndarray, int]], **also: Any
) -> dict[DataSplit, int]:
    """Write images with their parts and labels to the files of a folder, and return the number of images per part.

    Images are uint8 (c, h, w), all of the same shape. `also` is added to images.json.
    """
    counts, numbers = dict.fromkeys(DataSplit, 0), {part: [] for part in DataSplit}
    channels, shape = ChannelStatistics(), (0, 0, 0)
    files = {part: (folder / f"{part}.bin").open("wb") for part in DataSplit}
    try:
        for part, pixels, label in images:
            files[part].write(np.ascontiguousarray(pixels).tobytes())
            numbers[part].append(label)
            counts[part] += 1
            shape = pixels.shape
            if part is DataSplit.TRAIN:
                channels.add(pixels)
    finally:
        for file in files.values():
            file.close()
    for part, own in numbers.items():
        (folder / f"{part}_labels.bin").write_bytes(np.array(own, LABEL).tobytes())
    mean, std = channels.statistics() if channels.count else ((), ())
    facts = {"labels": list(labels), "shape": list(shape), "images": counts, "mean": mean, "std": std}
    (folder / IMAGES).write_text(json.dumps(facts | also, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return counts


def open_arrays(folder: Path, side: int | None = None) -> dict[DataSplit, ImageArrays]:
    """Return the parts of a folder written by `write_arrays`, with images resized to `side` pixels if `side` is set.

    Raises IntegrityError if the size of a file does not agree with images.json.
    """
    try:
        facts = json.loads((folder / IMAGES).read_text(encoding="utf-8"))
        channels, height, _ = shape = tuple(facts["shape"])
        ends = ImageModelSpec(tuple(facts["labels"]), height, channels, tuple(facts["mean"]), tuple(facts["std"]))
        parts = {}
        for part in DataSplit:
            count = facts["images"][part]
            pixels = np.memmap(folder / f"{part}.bin", np.uint8, "r", shape=(count, *shape))
            labels = np.fromfile(folder / f"{part}_labels.bin", LABEL)
            if len(labels) != count:
                raise ValueError(f"{len(labels)} labels for {count} images")
            file = folder / names_file(part)
            names = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ()
            parts[part] = ImageArrays(pixels, labels, ends if side is None else replace(ends, side=side), names=names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{str(folder)!r} is damaged: {error}", fix="delete the folder; Thrifty then builds it again"
        ) from None
    return parts
