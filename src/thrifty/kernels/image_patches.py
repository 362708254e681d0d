"""Images as patches, and which of them are seen. Shapes: b batch, c channels, h and w pixels, p pixels of a patch's
side, t patches row by row, n of them visible, d width."""

import torch
from torch import Tensor


def patchify(images: Tensor, patch: int) -> Tensor:
    """Images (b, c, h, w) as the pixels of their patches (b, t, p · p · c): of a patch row by row, and of each pixel
    its channels side by side, as MAE's decoder gives them (He et al. 2021, arXiv 2111.06377)."""
    b, c, h, w = images.shape
    cut = images.reshape(b, c, h // patch, patch, w // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(b, (h // patch) * (w // patch), patch * patch * c)


def unpatchify(pixels: Tensor, patch: int, height: int, width: int) -> Tensor:
    """The images (b, c, h, w) that `patchify` cut into pixels (b, t, p · p · c)."""
    cut = pixels.reshape(len(pixels), height // patch, width // patch, patch, patch, -1)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(len(pixels), -1, height, width)


def standardize_patches(pixels: Tensor) -> Tensor:
    """Each patch (…, m) less its mean, over its deviation: sqrt(variance + 1e-6), the variance with m - 1 in the
    denominator (MAE, section 4.1, and as its authors computed it)."""
    variance, mean = torch.var_mean(pixels, dim=-1, correction=1, keepdim=True)
    return (pixels - mean) / (variance + 1e-6).sqrt()


def match_brightness(pixels: Tensor, like: Tensor) -> Tensor:
    """Standardised patches (…, m) at the mean and the deviation of others: `standardize_patches` undone."""
    variance, mean = torch.var_mean(like, dim=-1, correction=1, keepdim=True)
    return pixels * (variance + 1e-6).sqrt() + mean


def blank_patches(images: Tensor, visible: Tensor, patch: int) -> Tensor:
    """Images (b, c, h, w) with zeros in every patch but those at the places `visible` (b, n)."""
    rows, columns = images.shape[-2] // patch, images.shape[-1] // patch
    seen = torch.zeros(len(images), rows * columns, dtype=images.dtype, device=images.device)
    seen = seen.scatter(1, visible, 1.0).view(-1, 1, rows, 1, columns, 1)
    return (images.unflatten(-1, (columns, patch)).unflatten(-3, (rows, patch)) * seen).view_as(images)


def sinusoids_2d(rows: int, columns: int, width: int) -> Tensor:
    """Fixed positions (rows · columns, d) of patches, row by row, float32: a quarter of the channels each for the sine
    and cosine of the column, then of the row, at frequencies from 1 to nearly 1/10,000 (MAE, appendix A.1; that the
    column comes first is the order that its published weights were trained with).

    Raises ValueError for a width that is no multiple of 4.
    """
    if width % 4:
        raise ValueError(f"{width} channels do not divide into four equal parts")
    frequencies = 10_000.0 ** (-torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width // 4))
    place = torch.arange(rows * columns, dtype=torch.float64, device="cpu")
    angles = [torch.outer(along, frequencies) for along in (place % columns, place // columns)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1).float()
