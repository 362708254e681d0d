"""Images as patches, and masks of visible patches.

Shapes: b batch, c channels, h and w pixels, p pixels per side of a patch, t patches in row-major order, n visible
patches, d width.
"""

import torch
from torch import Tensor


def patchify(images: Tensor, patch: int) -> Tensor:
    """Return images (b, c, h, w) as pixels of patches (b, t, p · p · c). Pixels of a patch are in row-major order, and
    the channels of a pixel are adjacent, as in MAE's decoder (He et al. 2021, arXiv 2111.06377).
    """
    b, c, h, w = images.shape
    cut = images.reshape(b, c, h // patch, patch, w // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(b, (h // patch) * (w // patch), patch * patch * c)


def unpatchify(pixels: Tensor, patch: int, height: int, width: int) -> Tensor:
    """Return images (b, c, h, w) from patch pixels (b, t, p · p · c). Inverse of `patchify`."""
    cut = pixels.reshape(len(pixels), height // patch, width // patch, patch, patch, -1)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(len(pixels), -1, height, width)


def standardize_patches(pixels: Tensor) -> Tensor:
    """Return each patch (…, m) minus its mean, divided by sqrt(variance + 1e-6). The variance divides by m - 1, as in
    MAE (section 4.1 and published code).
    """
    variance, mean = torch.var_mean(pixels, dim=-1, correction=1, keepdim=True)
    return (pixels - mean) / (variance + 1e-6).sqrt()


def match_brightness(pixels: Tensor, like: Tensor) -> Tensor:
    """Return standardized patches (…, m), rescaled to the mean and standard deviation of the patches `like`. Inverse of
    `standardize_patches`.
    """
    variance, mean = torch.var_mean(like, dim=-1, correction=1, keepdim=True)
    return pixels * (variance + 1e-6).sqrt() + mean


def blank_patches(images: Tensor, visible: Tensor, patch: int) -> Tensor:
    """Return images (b, c, h, w) in which all patches except those at positions `visible` (b, n) are zero."""
    rows, columns = images.shape[-2] // patch, images.shape[-1] // patch
    seen = torch.zeros(len(images), rows * columns, dtype=images.dtype, device=images.device)
    seen = seen.scatter(1, visible, 1.0).view(-1, 1, rows, 1, columns, 1)
    return (images.unflatten(-1, (columns, patch)).unflatten(-3, (rows, patch)) * seen).view_as(images)


def sinusoids_2d(rows: int, columns: int, width: int) -> Tensor:
    """Return fixed position embeddings (rows · columns, d) of patches in row-major order, in float32.

    The four quarters of the channels are the sine and cosine of the column, then the sine and cosine of the row.
    Frequencies range from 1 to nearly 1/10,000 (MAE, appendix A.1). Columns come first, because MAE's published weights
    have this order. Raises ValueError if the width is not a multiple of 4.
    """
    if width % 4:
        raise ValueError(f"position embeddings require a width that is a multiple of 4, got {width}")
    frequencies = 10_000.0 ** (-torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width // 4))
    place = torch.arange(rows * columns, dtype=torch.float64, device="cpu")
    angles = [torch.outer(along, frequencies) for along in (place % columns, place // columns)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1).float()
