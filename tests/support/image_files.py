"""Folders of image files for tests, whole and damaged in every way."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, shade: int = 128, size: tuple[int, int] = (12, 8), seed: int = 0) -> Path:
    """Write a file in the format of its name, with noise around a shade of grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-20, 20, (size[1], size[0], 3))
    Image.fromarray((shade + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path


def write_folder(root: Path, count: int = 12, labels: tuple[str, ...] = ("dark", "light")) -> Path:
    """Write a folder with a folder of dark or light images for each label."""
    for number, label in enumerate(labels):
        for index in range(count):
            write_image(root / label / f"{index:02}.png", 40 + 170 * number, seed=100 * number + index)
    return root


def png(width: int, height: int, packed: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """Return a PNG file whose header declares this size, bit depth and colour type (0 grey, 2 RGB)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    """Return a small PNG file whose header declares this size."""
    return png(width, height, zlib.compress(bytes(1000)))
