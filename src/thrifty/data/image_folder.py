"""A folder with a folder of images for each label, decoded once into arrays and kept in the cache.

Where the folder has parts of its own (train, and val or test), those are taken; otherwise images are held out by the
hash of their file. Files that cannot be decoded are left out, counted, and the first few of them named.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.data.cache import building
from thrifty.data.decoding import SUFFIXES, Undecodable, decode, pillow
from thrifty.data.image_arrays import write_arrays
from thrifty.data.prepare import built_once, write_manifest
from thrifty.data.splitting import Part

FORMAT = 1
NAMED = 5
"""How many of the files that were left out are named."""
GIVEN = {"train": Part.TRAIN, "val": Part.HELD_OUT, "valid": Part.HELD_OUT, "validation": Part.HELD_OUT,
         "test": Part.HELD_OUT}  # fmt: skip
"""Folders by which a source says itself what to train and what to test on; of several to test on the first here."""


@dataclass(frozen=True)
class ImageFile:
    path: Path
    label: str
    part: Part | None
    """None where the hash of the file decides."""


@dataclass
class LeftOut:
    count: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, file: ImageFile, why: str, root: Path) -> None:
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append(f"{file.path.relative_to(root)}: {why}")

    def __str__(self) -> str:
        more = f"; and {self.count - len(self.named)} more" if self.count > len(self.named) else ""
        return "; ".join(self.named) + more


def has_image_files(folder: Path) -> bool:
    """Whether there is any file below a folder that is called like an image."""
    return any(True for _ in _images_below(folder))


def has_other_files(folder: Path) -> bool:
    """Whether there is any other file, hidden ones aside, below a folder."""
    for root, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        if any(not name.startswith(".") and Path(root, name).suffix.lower() not in SUFFIXES for name in names):
            return True
    return False


def image_files(folder: Path) -> list[ImageFile]:
    """The image files of a folder, sorted. Raises UsageError where they do not lie in folders of two labels or more."""
    found = list(_labelled(folder))
    labels = sorted({file.label for file in found})
    if not found:
        lying = "images lie in the folder itself" if has_image_files(folder) else "there are no images"
        raise UsageError(
            f"{folder}: {lying}, and none in a folder that is called like its label",
            fix=f"put them into folders such as {folder.name}/cat and {folder.name}/dog",
        )
    if set(labels) <= GIVEN.keys():
        raise UsageError(
            f"{folder}: {' and '.join(labels)} would be the labels, and those are names of parts",
            fix=f"give {folder / labels[0]} by itself, or put two parts there: train, and val or test",
        )
    if len(labels) == 1:
        raise UsageError(
            f"{folder}: all images have the label {labels[0]!r}, so there is nothing to tell apart",
            fix="give a folder with a folder of images for each of two labels or more",
        )
    return found


def prepare_folder(folder: Path, side: int, held_out: float, say: Callable[[str], None]) -> Path:
    """The arrays of a folder's images, `side` pixels high and wide; decoded where they are not in the cache, or where
    a file has another name, size or time of change than it had."""
    pillow()
    files = image_files(folder)
    key = json.dumps(["images", FORMAT, side, held_out, _identity(folder, files)])
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return built_once(digest, f"the images of {folder}", lambda to: _build(folder, files, side, held_out, to, say), say)


def _images_below(folder: Path) -> Iterator[Path]:
    for root, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield Path(root, name)


def _folders_in(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")}


def _labelled(folder: Path) -> Iterator[ImageFile]:
    inner = _folders_in(folder)
    tests = [name for name, part in GIVEN.items() if part is Part.HELD_OUT and name in inner]
    if "train" in inner and tests:
        chosen = {"train": Part.TRAIN, tests[0]: Part.HELD_OUT}
        for name, part in chosen.items():
            for label, path in _folders_in(inner[name]).items():
                yield from (ImageFile(file, label, part) for file in _images_below(path))
        return
    for name, path in inner.items():
        yield from (ImageFile(file, name, None) for file in _images_below(path))


def _identity(folder: Path, files: list[ImageFile]) -> str:
    states = ((file.path, file.path.stat()) for file in files)
    listing = [f"{path.relative_to(folder)} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    return hashlib.blake2b("\n".join([str(folder.absolute()), *listing]).encode(), digest_size=16).hexdigest()


def _build(
    folder: Path, files: list[ImageFile], side: int, held_out: float, into: Path, say: Callable[[str], None]
) -> None:
    labels, left_out = sorted({file.label for file in files}), LeftOut()
    used: Counter[str] = Counter()

    def images() -> Iterator[tuple[Part, np.ndarray, int]]:
        for file in files:
            try:
                pixels = decode(file.path, side)
            except (Undecodable, OSError) as error:
                left_out.add(file, str(error), folder)
                continue
            used[file.label] += 1
            yield file.part or _part(file.path, held_out), pixels, labels.index(file.label)

    with building(into) as aside:
        counts = write_arrays(aside, labels, images())
        if left_out.count:
            say(f"{left_out.count} of {len(files)} image files are left out: {left_out}")
        _refuse_empty(folder, counts, [label for label in labels if not used[label]], held_out)
        about = {"source": str(folder), "left_out": left_out.count, "named": left_out.named}
        write_manifest(aside, {"format": FORMAT, **about})


def _part(path: Path, held_out: float) -> Part:
    """By the contents alone, so that a copy under another name is on the same side."""
    digest = hashlib.blake2b(path.read_bytes(), digest_size=8).digest()
    return Part.HELD_OUT if int.from_bytes(digest, "big") / 2**64 < held_out else Part.TRAIN


def _refuse_empty(folder: Path, counts: dict[Part, int], without: list[str], held_out: float) -> None:
    if without:
        raise UsageError(
            f"{folder}: not one image of the label {without[0]!r} can be read",
            fix="give it images that can, or remove its folder",
        )
    if not counts[Part.TRAIN] or not counts[Part.HELD_OUT]:
        what = "to train on" if not counts[Part.TRAIN] else f"when {held_out:.0%} are held out for evaluation"
        raise UsageError(f"{folder}: no image is left {what}", fix="give more images, or raise data.held_out")
