"""Handwritten digits: 1,797 real labelled images of 8 x 8 pixels, included in Thrifty.

Optical Recognition of Handwritten Digits, by E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licensed under Creative Commons Attribution 4.0 International
(https://creativecommons.org/licenses/by/4.0/). The images are from the test file of the dataset; scikit-learn includes
the same images. Only the file format was changed. 13 people wrote the digits, and the splits do not separate people.
"""

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from thrifty.core.errors import UsageError, did_you_mean
from thrifty.data.epoch_sampler import EpochSource
from thrifty.kernels.keyed_permutation import permute

DIGITS = tuple("0123456789")


TRAIN = 1300
"""Number of training images; the other 497 are test images."""
SPLIT_KEY = 0x44494749
BRIGHTEST = 16
STORED = Path(__file__).with_name("digits.safetensors")


class LabelledDigits(NamedTuple):
    """Images (n, 8, 8), float32 in [0, 1], and their labels (n,), int64 in 0 … 9."""

    images: Tensor
    labels: Tensor


@cache
def digits() -> LabelledDigits:
    """Return all 1,797 images with their labels."""
    stored = load_file(STORED)
    return LabelledDigits(stored["images"].float() / BRIGHTEST, stored["labels"].long())


@cache
def _places(split: str) -> np.ndarray:
    """Return the indices of the images in a split. They are the same on every machine and for every seed."""
    total = len(digits().labels)
    shuffled = permute(np.arange(total), total, SPLIT_KEY)
    parts = {"train": shuffled[:TRAIN], "test": shuffled[TRAIN:]}
    if split not in parts:
        raise UsageError(f"the digits have no split {split!r}", fix=did_you_mean(split, parts))
    return parts[split]


class FixedImages:
    """Images (n, …) with labels (n,) as indexed examples."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        rows = torch.from_numpy(indices)
        return {"inputs": self.images[rows], "labels": self.labels[rows]}


class DigitImages(FixedImages):
    """Images of a split of the digits."""

    def __init__(self, split: Literal["train", "test"]):
        super().__init__(*(values[_places(split)] for values in digits()))


class DigitEpochs(EpochSource):
    """Digits in epochs, a pure function of (seed, step): {"inputs": (b, 8, 8), "labels": (b,)}."""

    def __init__(self, split: Literal["train", "test"], batch: int, seed: int = 0):
        super().__init__(DigitImages(split), batch, seed)
