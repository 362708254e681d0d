"""Images of their low frequencies alone, in as many pixels as these need. Shapes: (…, h, w)."""

import torch
from torch import Tensor


def crop_spectrum(images: Tensor, height: int, width: int) -> Tensor:
    """Images (…, h, w) of floats at (height, width): the middle of their two-dimensional spectrum, and of that the
    image again (Wang et al. 2022, arXiv 2211.09703, section 4.1), times height · width / (h · w), so that a grey area
    keeps its brightness.

    It is the image behind an ideal low-pass, sampled at the new pixels. Of an even side the highest frequency stands in
    the spectrum twice, as positive and as negative: half of both is kept, so that the result is real for every image.
    """
    if images.shape[-2:] == (height, width):
        return images
    area = images.shape[-2] * images.shape[-1]
    spectrum = torch.fft.fft2(images.float())
    for dim, size in ((-2, height), (-1, width)):
        spectrum = _middle(spectrum, dim, size)
    return (torch.fft.ifft2(spectrum).real * (height * width / area)).to(images.dtype)


def _middle(spectrum: Tensor, dim: int, size: int) -> Tensor:
    """The `size` lowest frequencies along a dim, in torch's order: 0, 1, …, -2, -1."""
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
