"""Decoding of untrusted image files to arrays of equal size, with Pillow (extra `images`).

The size of an image is checked before any pixel is decoded. A truncated or damaged file is an error, never a half-gray
image. Images are rotated by their EXIF orientation. Transparency becomes white. All color spaces and bit depths become
8-bit RGB.
"""

import warnings
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from thrifty.core.errors import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
MOST_PIXELS = 100_000_000
"""Maximum number of pixels of a file. A larger file may be a decompression bomb."""
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of 16-bit grayscale images."""


class ImageDecodeError(Exception):
    """Error for an unusable image file. The text is the reason."""


def pillow() -> ModuleType:
    """Return `PIL.Image`. Raises UsageError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(
            "reading image files requires Pillow, which is not installed", fix="pip install 'thrifty[images]'"
        ) from None
    return Image


def decode(source: Path | bytes, side: int) -> np.ndarray:
    """Return the central square of an image file, scaled to uint8 (3, side, side). `source` is a path or contents.

    If a file has several images, the first image is used. Raises ImageDecodeError for a file that is missing, empty,
    not an image, too large, truncated or damaged. Raises OSError for a file that cannot be read.
    """
    image = pillow()
    if isinstance(source, Path) and not source.is_file():
        raise ImageDecodeError("it is not a file, or a broken link")
    if not (source if isinstance(source, bytes) else source.stat().st_size):
        raise ImageDecodeError("it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # warnings are about damaged metadata and about sizes, which `check_size` checks
            with image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as opened:
                check_size(*opened.size)
                opened.draft("RGB", (side, side))
                return np.asarray(_fitted(as_rgb(opened), side)).transpose(2, 0, 1)
    except ImageDecodeError:
        raise
    except image.UnidentifiedImageError:
        raise ImageDecodeError("it is not an image of a known format") from None
    except image.DecompressionBombError:
        raise ImageDecodeError(f"it has more than {MOST_PIXELS:,} pixels") from None
    except Exception as error:  # a damaged file can raise anything in a decoder: struct.error, SyntaxError, …
        raise ImageDecodeError(f"it is damaged: {error or type(error).__name__}") from None


def check_size(width: int, height: int) -> None:
    if not width * height:
        raise ImageDecodeError("it has no pixels")
    if width * height > MOST_PIXELS:
        raise ImageDecodeError(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")


def as_rgb(opened: "Image") -> "Image":
    """Return an upright RGB image: 16-bit values are scaled to 8 bits, and transparency becomes white."""
    from PIL import ImageOps

    opened.load()
    upright = ImageOps.exif_transpose(opened)
    if upright.mode in DEEP:
        grey = np.asarray(upright).astype(np.int64).clip(0, 65_535)
        upright = pillow().fromarray(((grey + 128) // 257).astype(np.uint8))
    if upright.mode == "F":
        raise ImageDecodeError("its pixels are floating-point numbers of no known range")
    if upright.has_transparency_data:
        clear = upright.convert("RGBA")
        white = pillow().new("RGBA", clear.size, (255, 255, 255, 255))
        upright = pillow().alpha_composite(white, clear)
    return upright.convert("RGB")


def _fitted(image: "Image", side: int) -> "Image":
    """Return the largest central square, scaled to `side`."""
    width, height = image.size
    edge = min(width, height)
    left, top = (width - edge) / 2, (height - edge) / 2
    box = (left, top, left + edge, top + edge)
    return image.resize((side, side), pillow().Resampling.BILINEAR, box=box)
