"""Which image files there are below a folder, which of them are held out, and what is said of those left out."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from thrifty.data.images.image_decoding import SUFFIXES
from thrifty.data.train_split import DataSplit

GIVEN = {
    "train": DataSplit.TRAIN,
    "val": DataSplit.HELD_OUT,
    "valid": DataSplit.HELD_OUT,
    "validation": DataSplit.HELD_OUT,
    "test": DataSplit.HELD_OUT,
}
"""Folders by which a source says itself what to train and what to test on; of several to test on the first here."""


def is_image_name(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def has_image_files(folder: Path) -> bool:
    """Whether there is any file below a folder that is called like an image."""
    return any(True for _ in images_below(folder))


def image_share(folder: Path) -> float:
    """The share of the files below a folder, hidden ones aside, that are called like images; 0 without any files."""
    called = [is_image_name(path.name) for path in files_below(folder)]
    return sum(called) / max(len(called), 1)


def images_below(folder: Path) -> Iterator[Path]:
    return (path for path in files_below(folder) if is_image_name(path.name))


def files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder that is not hidden, in sorted order. Links to folders are followed, to each folder
    once: they may lead in a circle."""
    seen: set[str] = set()
    for root, inner, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(names) if not name.startswith("."))


def folders_in(folder: Path) -> dict[str, Path]:
    """The folders in a folder that are not hidden, by name."""
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def split_folders(folder: Path) -> list[tuple[DataSplit | None, Path]]:
    """The folders of the parts that a source has itself; the folder as a whole where it has none, its part unknown."""
    inner = folders_in(folder)
    tests = [name for name, part in GIVEN.items() if part is DataSplit.HELD_OUT and name in inner]
    if "train" in inner and tests:
        return [(DataSplit.TRAIN, inner["train"]), (DataSplit.HELD_OUT, inner[tests[0]])]
    return [(None, folder)]


def folder_state(paths: Iterable[Path]) -> str:
    """A hash of files' paths, sizes and times of change, quick for any amount of data."""
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            state = path.stat()
            said = f"{state.st_size} {state.st_mtime_ns}"
        except OSError:
            said = "gone"
        digest.update(os.fsencode(path) + f" {said}\n".encode())
    return digest.hexdigest()


def part_by_hash(image: Path | bytes, held_out: float) -> DataSplit:
    """By the contents of the file alone, so that a copy under another name is on the same side."""
    if isinstance(image, bytes):
        digest = hashlib.blake2b(image, digest_size=8)
    else:
        with image.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8))
    return DataSplit.HELD_OUT if int.from_bytes(digest.digest(), "big") / 2**64 < held_out else DataSplit.TRAIN
