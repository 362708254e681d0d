"""Images in fewer pixels, and what cuts them into patches at another size. Shapes: (…, h, w), channels and examples in
front."""

import torch
import torch.nn.functional as F
from torch import Tensor


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Images (b, c, h, w) or (b, h, w) of floats at another size: linear interpolation over as many pixels as one new
    pixel covers, so that what is finer than a new pixel is averaged out and does not come back as a coarse pattern."""
    if images.shape[-2:] == (height, width):
        return images
    batched = images if images.ndim == 4 else images.unsqueeze(1)
    small = F.interpolate(batched, (height, width), mode="bilinear", align_corners=False, antialias=True)
    return small if images.ndim == 4 else small.squeeze(1)


def scaled_side(side: int, share: float, multiple: int) -> int:
    """A side times `share`, in multiples of `multiple`; at least one multiple and at most what there is."""
    return side if share >= 1 else min(max(round(side * share / multiple), 1) * multiple, side)


def resized_positions(positions: Tensor, grid: tuple[int, int], before: int) -> Tensor:
    """Positions (1, before + s · s, d) of a square grid, for a grid of other height and width: those of the `before`
    tokens stay, those of the patches are interpolated bicubically."""
    s = round((positions.shape[1] - before) ** 0.5)
    if grid == (s, s):
        return positions
    first, patches = positions.split([before, s * s], dim=1)
    # by what becomes of each position alone: a GPU sums gradients of an interpolation itself in no fixed order
    basis = torch.eye(s * s, device=positions.device).view(-1, 1, s, s)
    by = F.interpolate(basis, size=grid, mode="bicubic", align_corners=False).flatten(1)
    with torch.autocast(positions.device.type, enabled=False):
        return torch.cat((first, (by.T @ patches.float()).to(positions.dtype)), 1)


def resized_patches(kernel: Tensor, side: int) -> Tensor:
    """The weight (d, c, p, p) that makes tokens of patches, for patches of another side.

    A smaller patch gives what it would give enlarged (bilinearly) under the old weight. For a larger side it is the
    smallest weight of which that is true the other way round (Beyer et al. 2022, FlexiViT, arXiv 2212.08013: there all
    resizing is by the pseudo-inverse), so that what is made larger and then smaller again is as it was.
    """
    old = kernel.shape[-1]
    if side == old:
        return kernel
    small, large = sorted((side, old))
    basis = torch.eye(small * small, dtype=torch.float64).view(-1, 1, small, small)
    enlarging = F.interpolate(basis, size=(large, large), mode="bilinear", align_corners=False).flatten(1)
    by = enlarging.T if side < old else torch.linalg.pinv(enlarging.T)
    flat = kernel.flatten(2).double() @ by.to(kernel.device)
    return flat.unflatten(2, (side, side)).to(kernel.dtype)
