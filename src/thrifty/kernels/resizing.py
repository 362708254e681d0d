"""Images in fewer pixels. Shapes: (…, h, w), channels and examples in front."""

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
