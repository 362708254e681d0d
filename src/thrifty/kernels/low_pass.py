"""Low-pass filtered images, stored with as few pixels as their frequencies require. Shapes: (…, h, w)."""

import torch
from torch import Tensor


def crop_spectrum(images: Tensor, height: int, width: int) -> Tensor:
    """Return float images (…, h, w) at size (height, width), from the center of their two-dimensional spectrum.

    The result is scaled by height · width / (h · w), so that a gray area keeps its brightness (Wang et al. 2022, arXiv
    2211.09703, section 4.1). The result equals the image after an ideal low-pass filter, sampled at the new pixels. For
    an even side, the new spectrum has one entry for the highest frequency. This entry is the mean of the positive and
    the negative frequency, so that the result is real.
    """
    if images.shape[-2:] == (height, width):
        return images
    area = images.shape[-2] * images.shape[-1]
    spectrum = torch.fft.fft2(images.float())
    for dim, size in ((-2, height), (-1, width)):
        spectrum = _middle(spectrum, dim, size)
    return (torch.fft.ifft2(spectrum).real * (height * width / area)).to(images.dtype)


def _middle(spectrum: Tensor, dim: int, size: int) -> Tensor:
    """Return the `size` lowest frequencies along a dim, in torch's order: 0, 1, …, -2, -1."""
    full = spectrum.shape[dim]
    if size == full:
        return spectrum
    positive, negative = (size + 1) // 2, (size - 1) // 2
    parts = [spectrum.narrow(dim, 0, positive)]
    if size % 2 == 0:
        edges = spectrum.narrow(dim, size // 2, 1), spectrum.narrow(dim, full - size // 2, 1)
        parts.append((edges[0] + edges[1]) / 2)
    parts.append(spectrum.narrow(dim, full - negative, negative))
    return torch.cat(parts, dim)
