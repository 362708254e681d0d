"""Data augmentation of training images, as a pure function of each image's key.

Global random generators, the order of images and ranks have no effect. Random values of one augmentation do not depend
on other augmentations. Images are float (b, c, h, w) in 0 … 1. Keys are uint64 (b,).

- Crops and flips as for CIFAR since He et al. 2015.
- Operations on colors and geometry as in RandAugment (Cubuk et al. 2019, arXiv 1909.13719), without the operations
  equalize and sharpness.
- Random erasing (Zhong et al. 2017, arXiv 1708.04896).
- mixup (Zhang et al. 2017, arXiv 1710.09412) and CutMix (Yun et al. 2019, arXiv 1905.04899). The second image is
  sampled from all training images, not from the batch. Ranks therefore do not exchange images.
"""

import math
from collections.abc import Callable
from enum import IntEnum

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.recipe import AugmentationSettings
from thrifty.kernels.example_rng import random_fractions, random_integers

PER_PURPOSE = 64
"""Number of random values per key and purpose. An operation uses two values, and `AugmentationSettings` allows at
most 32 operations."""
ERASED = (0.02, 1 / 3)
"""Minimum and maximum erased fraction of an image."""
NARROWEST = 0.3
"""Minimum ratio of width to height of the erased rectangle. The maximum ratio is 1 / NARROWEST."""


class AugmentationDraw(IntEnum):
    """Purposes of the random values that a key seeds."""

    CROP = 0
    FLIP = 1
    OPERATION = 2
    ERASE = 3
    MIX = 4
    PARTNER = 5
    CAPTION = 6


def uniform(keys: np.ndarray, purpose: AugmentationDraw, count: int) -> Tensor:
    """Return `count` uniform random values in [0, 1) for each of b keys, float64 (b, count)."""
    return torch.from_numpy(random_fractions(random_integers(keys, count, skip=PER_PURPOSE * purpose)))


def partners(keys: np.ndarray, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the index and the random key of a second training image for each key, (b,) each. mixup and CutMix mix an
    image with the second image."""
    numbers = random_integers(keys, 2, skip=PER_PURPOSE * AugmentationDraw.PARTNER)
    return (numbers[:, 0] % np.uint64(images)).astype(np.int64), numbers[:, 1].copy()


def augment(images: Tensor, keys: np.ndarray, how: AugmentationSettings, fill: tuple[float, ...]) -> Tensor:
    """Return images with crops, flips, operations and erasing; `fill` is the color of empty pixels."""
    colour = torch.tensor(fill).view(1, -1, 1, 1)
    if how.crop or how.flip:
        images = crop_and_flip(images, keys, how.crop, how.flip)
    if how.operations:
        images = apply_operations(images, keys, how.operations, how.magnitude, colour)
    return erase_rectangles(images, keys, how.erase, colour) if how.erase else images


def crop_and_flip(images: Tensor, keys: np.ndarray, crop: int, flip: bool) -> Tensor:
    """Shift images by up to `crop` pixels in each direction, with black padding. With `flip`, mirror random images."""
    h, w = images.shape[-2:]
    padded = F.pad(images, (crop,) * 4).numpy()
    places = (uniform(keys, AugmentationDraw.CROP, 2) * (2 * crop + 1)).long().tolist()
    mirrored = (uniform(keys, AugmentationDraw.FLIP, 1)[:, 0] < 0.5).tolist()
    augmented = np.empty(images.shape, padded.dtype)
    # slicing image by image is about ten times as fast as indexing all images with tensors
    for number, (top, left) in enumerate(places):
        piece = padded[number, :, top : top + h, left : left + w]
        augmented[number] = piece[:, :, ::-1] if flip and mirrored[number] else piece
    return torch.from_numpy(augmented)


def erase_rectangles(images: Tensor, keys: np.ndarray, share: float, colour: Tensor) -> Tensor:
    """Fill a rectangle of random size and position with one color, in a random fraction `share` of images."""
    h, w = images.shape[-2:]
    chance, area, aspect, top, left = uniform(keys, AugmentationDraw.ERASE, 5).unbind(1)
    area = (ERASED[0] + area * (ERASED[1] - ERASED[0])) * h * w
    aspect = torch.exp((2 * aspect - 1) * math.log(1 / NARROWEST))
    high = (area / aspect).sqrt().round().clamp(1, h)
    wide = (area * aspect).sqrt().round().clamp(1, w)
    inside = rectangles((top * (h - high + 1)).floor(), (left * (w - wide + 1)).floor(), high, wide, h, w)
    return torch.where(inside & (chance < share).view(-1, 1, 1, 1), colour, images)


def rectangles(top: Tensor, left: Tensor, high: Tensor, wide: Tensor, h: int, w: int) -> Tensor:
    """Return a mask of the pixels inside each rectangle, boolean (b, 1, h, w)."""
    y, x = torch.arange(h), torch.arange(w)
    rows = (y >= top[:, None]) & (y < (top + high)[:, None])
    columns = (x >= left[:, None]) & (x < (left + wide)[:, None])
    return rows[:, None, :, None] & columns[:, None, None, :]


def mix_examples(images: Tensor, others: Tensor, keys: np.ndarray, how: AugmentationSettings) -> tuple[Tensor, Tensor]:
    """Mix images with `others`. Return the mixed images, and the fraction (b,) that remains of each image.

    If both mixup and CutMix are set, a random half of the images uses CutMix.
    """
    coin, amount, middle_y, middle_x = uniform(keys, AugmentationDraw.MIX, 4).unbind(1)
    h, w = images.shape[-2:]
    cut = coin < (0.5 if how.mixup and how.cutmix else 1.0 if how.cutmix else 0.0)
    blended = _beta(amount, how.mixup or 1.0)
    side = (1 - _beta(amount, how.cutmix or 1.0)).sqrt()
    high, wide = (side * h).round(), (side * w).round()
    top, left = (middle_y * h).floor() - (high / 2).floor(), (middle_x * w).floor() - (wide / 2).floor()
    inside = rectangles(top, left, high, wide, h, w)
    pasted = torch.where(inside, others, images)
    weight = blended.float().view(-1, 1, 1, 1)
    mixed = others + weight * (images - others)
    own = torch.where(cut, 1 - inside.double().mean((1, 2, 3)), blended)
    return torch.where(cut.view(-1, 1, 1, 1), pasted, mixed), own.float()


def _beta(uniform: Tensor, shape: float) -> Tensor:
    """Transform uniform values to the distribution Beta(shape, shape)."""
    from scipy.special import (
        betaincinv,
    )  # imported here, because the import takes 0.1 s and only mixed images require it

    return torch.from_numpy(betaincinv(shape, shape, uniform.numpy()))


def apply_operations(images: Tensor, keys: np.ndarray, operations: int, magnitude: float, colour: Tensor) -> Tensor:
    """Apply a sequence of random operations to each image. Strengths have a random sign."""
    which, sign = uniform(keys, AugmentationDraw.OPERATION, 2 * operations).chunk(2, dim=1)
    chosen = (which * len(OPERATIONS)).long()
    strengths = magnitude * torch.where(sign < 0.5, -1.0, 1.0)
    images = images.clone()
    for position in range(operations):
        for number, operation in enumerate(OPERATIONS):
            rows = (chosen[:, position] == number).nonzero()[:, 0]
            if len(rows):
                strength = strengths[rows, position].float().view(-1, 1, 1, 1)
                images[rows] = operation(images[rows], strength, colour)
    return images


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of images (b, c, h, w), strengths (b, 1, 1, 1) in -1 … 1, and the color of empty pixels."""


def grey(images: Tensor) -> Tensor:
    """Return the luma (ITU-R BT.601) of RGB images, or the channel mean of other images, (b, 1, h, w)."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def away_from(other: Tensor, images: Tensor, strength: Tensor) -> Tensor:
    """Move images towards `other` for negative strengths, and away from `other` for positive strengths."""
    return (other + (1 + 0.9 * strength) * (images - other)).clamp(0, 1)


def same(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    return images


def brightness(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    return away_from(torch.zeros_like(images), images, strength)


def contrast(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    return away_from(grey(images).double().mean((2, 3), keepdim=True).float(), images, strength)


def saturation(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    return away_from(grey(images), images, strength)


def stretch(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    """Rescale each channel to the range 0 … 1."""
    least, most = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(most > least, (images - least) / (most - least).clamp(min=1e-6), images)


def posterize(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    """Reduce the number of levels: 256 at strength 0, 16 at strength 1."""
    levels = 2 ** (8 - 4 * strength.abs()).round()
    return (images * levels).floor().clamp(max=levels - 1) / (levels - 1)


def solarize(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    """Invert pixels that are brighter than 1 - strength."""
    return torch.where(images > 1 - strength.abs(), 1 - images, images)


def rotate(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    angle = strength * math.radians(30)
    return warp(images, colour, (angle.cos(), -angle.sin()), (angle.sin(), angle.cos()))


def shear_x(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    one, none = torch.ones_like(strength), torch.zeros_like(strength)
    return warp(images, colour, (one, 0.3 * strength), (none, one))


def shear_y(images: Tensor, strength: Tensor, colour: Tensor) -> Tensor:
    one, none = torch.ones_like(strength), torch.zeros_like(strength)
    return warp(images, colour, (one, none), (0.3 * strength, one))


def warp(images: Tensor, colour: Tensor, to_x: tuple[Tensor, Tensor], to_y: tuple[Tensor, Tensor]) -> Tensor:
    """Resample images by a linear map around the center. `to_x` and `to_y` are the rows of the 2 x 2 matrix."""
    h, w = images.shape[-2:]
    y = ((torch.arange(h) + 0.5) * 2 / h - 1).view(1, h, 1)
    x = ((torch.arange(w) + 0.5) * 2 / w - 1).view(1, 1, w)
    (xx, xy), (yx, yy) = ((a[:, 0], b[:, 0]) for a, b in (to_x, to_y))
    grid = torch.stack((xx * x + xy * y, yx * x + yy * y), dim=-1)
    return F.grid_sample(images - colour, grid, align_corners=False) + colour


OPERATIONS: tuple[Operation, ...] = (
    same, brightness, contrast, saturation, stretch, posterize, solarize, rotate, shear_x, shear_y,
)  # fmt: skip
"""Operations of `apply_operations`. Translation is missing, because crops translate images."""
