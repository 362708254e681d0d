"""Resizing of images and of patch embeddings. Images are (…, h, w), with examples and channels first."""

import torch
import torch.nn.functional as F
from torch import Tensor


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Return float images (b, c, h, w) or (b, h, w) resized to (height, width), by antialiased linear interpolation.

    Each new pixel averages all pixels that it covers. Fine detail therefore does not cause aliasing.
    """
    if images.shape[-2:] == (height, width):
        return images
    batched = images if images.ndim == 4 else images.unsqueeze(1)
    small = F.interpolate(batched, (height, width), mode="bilinear", align_corners=False, antialias=True)
    return small if images.ndim == 4 else small.squeeze(1)


def scaled_side(side: int, share: float, multiple: int) -> int:
    """Return side · share, rounded to a multiple of `multiple`: at least one multiple, at most the side."""
    return side if share >= 1 else min(max(round(side * share / multiple), 1) * multiple, side)


def resized_positions(
    positions: Tensor, grid: tuple[int, int], before: int, full: tuple[int, int] | None = None
) -> Tensor:
    """Return position embeddings (1, before + h · w, d) of a grid `full` (h, w), by default a square, interpolated to
    `grid`, a height and a width in patches.

    Positions of the first `before` tokens are unchanged. Patch positions are interpolated bicubically.
    """
    h, w = full or (round((positions.shape[1] - before) ** 0.5),) * 2
    if grid == (h, w):
        return positions
    first, patches = positions.split([before, h * w], dim=1)
    # as a matmul, because a GPU sums gradients of an interpolation in no fixed order
    basis = torch.eye(h * w, device=positions.device).view(-1, 1, h, w)
    by = F.interpolate(basis, size=grid, mode="bicubic", align_corners=False).flatten(1)
    with torch.autocast(positions.device.type, enabled=False):
        return torch.cat((first, (by.T @ patches.float()).to(positions.dtype)), 1)


def resized_patches(kernel: Tensor, side: int) -> Tensor:
    """Return the patch embedding weight (d, c, p, p), resized for patches of `side` pixels per side.

    For smaller patches, the new weight gives, for each patch, the output of the old weight for the bilinearly enlarged
    patch. For larger patches, the new weight gives, for each bilinearly enlarged patch, the output of the old weight
    for the original patch. Of all weights with this property, the result has the smallest norm (pseudo-inverse).
    Enlarging and then shrinking a weight therefore restores it. FlexiViT (Beyer et al. 2022, arXiv 2212.08013) uses the
    pseudo-inverse for all resizing.
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
