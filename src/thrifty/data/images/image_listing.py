"""Image files below a folder, and their split into training and held-out files."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from thrifty.data.images.image_decoding import SUFFIXES
from thrifty.data.train_split import DataSplit

PART_FOLDERS = {
    "train": DataSplit.TRAIN,
    "training": DataSplit.TRAIN,
    "val": DataSplit.HELD_OUT,
    "valid": DataSplit.HELD_OUT,
    "validation": DataSplit.HELD_OUT,
    "test": DataSplit.HELD_OUT,
    "testing": DataSplit.HELD_OUT,
    "dev": DataSplit.HELD_OUT,
    "eval": DataSplit.HELD_OUT,
}
"""Part that each folder name means, without case. If several folders of a part exist, the first in this order is used.
"""


def part_of(name: str) -> DataSplit | None:
    """Return the part that a folder name means, without case; None for another name."""
    return PART_FOLDERS.get(name.casefold())


def is_image_name(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def has_image_files(folder: Path) -> bool:
    """Return True if any file below a folder has an image suffix."""
    return any(True for _ in images_below(folder))


def image_share(folder: Path) -> float:
    """Return the fraction of visible files below a folder that have an image suffix; 0 without files."""
    are_images = [is_image_name(path.name) for path in files_below(folder)]
    return sum(are_images) / max(len(are_images), 1)


def images_below(folder: Path) -> Iterator[Path]:
    return (path for path in files_below(folder) if is_image_name(path.name))


def files_below(folder: Path) -> Iterator[Path]:
    """Yield every visible file below a folder in sorted order.

    Links to folders are followed. Each folder is visited once, because links may be circular.
    """
    visited: set[str] = set()
    for root, inner, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in visited:
            inner.clear()
            continue
        visited.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(names) if not name.startswith("."))


def folders_in(folder: Path) -> dict[str, Path]:
    """Return the visible subfolders of a folder, by name."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def split_folders(folder: Path, labelled: bool = False) -> list[tuple[DataSplit | None, Path]]:
    """Return (part, folder) pairs: the train and held-out folders, or (None, folder) if there is no split. With
    `labelled`, both parts contain folders."""
    inner = {name.casefold(): path for name, path in folders_in(folder).items()}
    parts: dict[DataSplit, Path] = {}
    for name, part in PART_FOLDERS.items():
        if name in inner:
            parts.setdefault(part, inner[name])
    is_split = len(parts) == len(DataSplit) and (not labelled or all(map(folders_in, parts.values())))
    return [(part, parts[part]) for part in DataSplit] if is_split else [(None, folder)]


def folder_state(paths: Iterable[Path]) -> str:
    """Return a hash of paths, sizes and modification times. Contents are not read."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            stat = path.stat()
            state = f"{stat.st_size} {stat.st_mtime_ns}"
        except OSError:
            state = "gone"
        digest.update(os.fsencode(path) + f" {state}\n".encode())
    return digest.hexdigest()


def part_by_hash(image: Path | bytes, held_out: float) -> DataSplit:
    """Return the part of a file by a hash of its contents. A copy under another name has the same part."""
    if isinstance(image, bytes):
        digest = hashlib.blake2b(image, digest_size=8)
    else:
        with image.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8))
    return DataSplit.HELD_OUT if int.from_bytes(digest.digest(), "big") / 2**64 < held_out else DataSplit.TRAIN
