"""Previews of images as small PNG files."""

import base64
import struct
import zlib

import numpy as np
import torch
from torch import Tensor

from thrifty.core.model_spec import ImageModelSpec
from thrifty.data.images.image_arrays import denormalized
from thrifty.kernels.image_resizing import resize

LARGEST = 64
"""Maximum side of a picture in pixels. Larger images are scaled down."""

LARGEST_INPUT = 128
"""Maximum side in pixels for pictures of model inputs and outputs, larger so that patches are visible."""


def input_pictures(images: Tensor, ends: ImageModelSpec) -> list[str]:
    """Return a data URL of a picture for each model input (b, c, h, w)."""
    return [picture(image, LARGEST_INPUT) for image in denormalized(images.float().cpu(), ends)]


def picture(image: Tensor, largest: int = LARGEST) -> str:
    """Return a data URL of a PNG of an image (c, h, w) in 0 … 1, with sides of at most `largest` pixels.

    An image of three channels is shown in color. Any other image is shown in gray, by its first channel.
    """
    _, height, width = image.shape
    if max(height, width) > largest:
        scale = largest / max(height, width)
        image = resize(image[None], max(round(height * scale), 1), max(round(width * scale), 1))[0]
    colours = image if len(image) == 3 else image[:1]
    pixels = (colours.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def png(pixels: np.ndarray) -> bytes:
    """Return a PNG file of uint8 pixels (h, w, c) with c = 1 or 3 (W3C, Portable Network Graphics, sections 5, 11)."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    lines = np.concatenate((np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), axis=1)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content
