"""Folders of image files for the tests: whole ones, and every kind of broken one."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def write_image(path: Path, shade: int = 128, size: tuple[int, int] = (12, 8), seed: int = 0) -> Path:
    """A file in the format of its name: noise around a shade of grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-20, 20, (size[1], size[0], 3))
    Image.fromarray((shade + noise).clip(0, 255).astype(np.uint8)).save(path)
    return path


def write_folder(root: Path, count: int = 12, labels: tuple[str, ...] = ("dark", "light")) -> Path:
    """A folder with a folder for each label, dark or light images in it."""
    for number, label in enumerate(labels):
        for index in range(count):
            write_image(root / label / f"{index:02}.png", 40 + 170 * number, seed=100 * number + index)
    return root


def png(width: int, height: int, packed: bytes, depth: int = 8, colour: int = 0) -> bytes:
    """A PNG file that says it has so many pixels of this depth and type of colour (0 grey, 2 RGB), its lines packed."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def bomb(width: int, height: int) -> bytes:
    """A small PNG file that says it has so many pixels."""
    return png(width, height, zlib.compress(bytes(1000)))
