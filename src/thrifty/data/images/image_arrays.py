"""Images ready to train on: a folder with the pixels and labels of each part, memory-mapped.

train.bin, held_out.bin                 pixels, uint8 (n, c, h, w)
train_labels.bin, held_out_labels.bin   int32 (n,)
train_names.json, held_out_names.json   the files they come from, where they come from files of their own
images.json                             shape and number of images, names of labels, mean and deviation of training
                                        pixels, and what the pixels came from
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
    """Images (b, c, h, w) of 0 … 1 as models are given them: less the mean, over the deviation of each channel."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (ends.mean, ends.std))
    return images.sub(mean).div_(std)


def denormalized(images: Tensor, ends: ImageModelSpec) -> Tensor:
    """Images (b, c, h, w) of 0 … 1 again, of those that `normalized` gives."""
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (ends.mean, ends.std))
    return images.mul(std).add_(mean)


@dataclass(frozen=True)
class ImageArrays:
    """The images of one part, each to be had by itself (see `IndexedExamples`)."""

    pixels: np.ndarray
    """uint8 (n, c, h, w), from 0 to `brightest`."""
    labels: np.ndarray
    ends: ImageModelSpec
    """The side may be another than that of the pixels: images are then given out in that size."""
    brightest: int = BRIGHTEST
    names: Sequence[str] = ()
    """Of the files that the images come from, where they come from files of their own."""

    def __len__(self) -> int:
        return len(self.labels)

    def shown(self, indices: np.ndarray) -> Tensor:
        """Images of 0 … 1, float32 (b, c, side, side)."""
        return self._scaled(self._stored(indices))

    def changed(self, indices: np.ndarray, keys: np.ndarray, how: AugmentationSettings) -> Tensor:
        """The same, each changed by its own of the keys uint64 (b,), see `augmentation.augment`."""
        pixels = self._stored(indices)
        if pixels.shape[-1] == self.ends.side and (how.crop or how.flip):  # bytes are moved faster, to the same effect
            pixels, how = crop_and_flip(pixels, keys, how.crop, how.flip), replace(how, crop=0, flip=False)
        return augment(self._scaled(pixels), keys, how, self.ends.mean)

    def _stored(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.pixels[indices]))

    def _scaled(self, pixels: Tensor) -> Tensor:
        return resize(pixels.float().div_(self.brightest), self.ends.side, self.ends.side)

    def labels_of(self, indices: np.ndarray) -> Tensor:
        """int64 (b,)."""
        return torch.from_numpy(self.labels[indices].astype(np.int64))

    def example_index(self) -> ExampleIndex:
        """Of the pixels as they are stored: given out in another size they are the same images."""
        labels = self.labels_of(np.arange(len(self))) if self.ends.labels else None
        return ExampleIndex(len(self), self._fingerprint, labels, self.ends.labels)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.pixels, *([self.labels] if self.ends.labels else []), also=self.ends.labels)

    def unlabelled(self) -> "ImageArrays":
        """The same images for whoever has no use for their labels."""
        return replace(self, ends=replace(self.ends, labels=()))

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        """{"inputs": (b, c, side, side)}, and "labels" (b,) where there are any."""
        labels = {"labels": self.labels_of(indices)} if self.ends.labels else {}
        return {"inputs": normalized(self.shown(indices), self.ends), **labels}


def names_file(part: DataSplit) -> str:
    return f"{part}_names.json"


@dataclass
class ChannelStatistics:
    """Mean and deviation of each channel, over images that come one at a time; sums of whole numbers, so exact."""

    count: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))

    def add(self, pixels: np.ndarray) -> None:
        """One image (c, h, w)."""
        flat = pixels.reshape(len(pixels), -1).astype(np.int64)
        self.count += flat.shape[1]
        self.sums, self.squares = self.sums + flat.sum(1), self.squares + (flat * flat).sum(1)

    def statistics(self, brightest: int = BRIGHTEST) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """With pixels of 0 … 1; a channel without any variation has the deviation 1."""
        mean = self.sums / self.count
        std = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
        return tuple((mean / brightest).tolist()), tuple((np.where(std > 0, std, brightest) / brightest).tolist())


def write_arrays(
    folder: Path, labels: Sequence[str], images: Iterable[tuple[DataSplit, np.ndarray, int]], **also: Any
) -> dict[DataSplit, int]:
    """Images with their parts and labels, each uint8 (c, h, w) and all of one shape, as the files of a folder. Returns
    how many images each part has; `also` goes into images.json."""
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
    said = {"labels": list(labels), "shape": list(shape), "images": counts, "mean": mean, "std": std}
    (folder / IMAGES).write_text(json.dumps(said | also, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return counts


def open_arrays(folder: Path, side: int | None = None) -> dict[DataSplit, ImageArrays]:
    """The parts of a folder written by `write_arrays`, images given out `side` pixels high and wide, or as large as
    they are.

    Raises IntegrityError where a file has not the size that images.json says.
    """
    try:
        said = json.loads((folder / IMAGES).read_text(encoding="utf-8"))
        channels, height, _ = shape = tuple(said["shape"])
        ends = ImageModelSpec(tuple(said["labels"]), height, channels, tuple(said["mean"]), tuple(said["std"]))
        parts = {}
        for part in DataSplit:
            count = said["images"][part]
            pixels = np.memmap(folder / f"{part}.bin", np.uint8, "r", shape=(count, *shape))
            labels = np.fromfile(folder / f"{part}_labels.bin", LABEL)
            if len(labels) != count:
                raise ValueError(f"{len(labels)} labels for {count} images")
            named = folder / names_file(part)
            names = json.loads(named.read_text(encoding="utf-8")) if named.is_file() else ()
            parts[part] = ImageArrays(pixels, labels, ends if side is None else replace(ends, side=side), names=names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{folder} is damaged: {error}", fix="delete the folder, so that it is made anew"
        ) from None
    return parts
