"""Image folders with a subfolder for each label. Images are decoded once into cached arrays.

If the folder contains a folder train, and a folder val or test, these two folders are the training and the held-out
part. Otherwise images are split by the hash of each file. Files that cannot be decoded are left out and counted, and
the first few are named. Objectives without labels use images in any subfolder. If all images are in label folders, the
same arrays are used with and without labels.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thrifty.core.errors import UsageError
from thrifty.data.data_cache import build_folder
from thrifty.data.images import image_listing
from thrifty.data.images.image_arrays import names_file, write_arrays
from thrifty.data.images.image_decoding import ImageDecodeError, decode, pillow
from thrifty.data.prepared_cache import cache_key, open_or_build, read_manifest, write_manifest
from thrifty.data.skipped_files import SkippedFiles, printable
from thrifty.data.train_split import DataSplit

FORMAT = 2


@dataclass(frozen=True)
class ImageFile:
    """An image file with its label and its part."""

    path: Path
    label: str
    """Name of the label folder; empty for an image outside of label folders."""
    part: DataSplit | None
    """Part of the split; None for a split by the hash of the file."""


def image_files(folder: Path, labelled: bool = True) -> list[ImageFile]:
    """Return the sorted image files of a folder.

    Raises UsageError if there are no images. With `labelled`, also raises it unless images are in at least two label
    folders.
    """
    files = list(_listed(folder, labelled))
    if not labelled:
        if not files:
            raise UsageError(
                f"{folder}: there are no images", fix="set data.source to a folder of .png, .jpg or .webp files"
            )
        return files
    labels = sorted({file.label for file in files})
    if not files:
        what = "images are in the folder itself" if image_listing.has_image_files(folder) else "there are no images"
        raise UsageError(
            f"{folder}: {what}, and none in a folder named after a label",
            fix=f"put images into folders such as {folder.name}/cat and {folder.name}/dog",
        )
    if misplaced := _part_names(labels):
        raise UsageError(
            f"{folder}: {' and '.join(misplaced)} would be among the labels, but these are names of parts",
            fix=_fix_of_parts(folder, misplaced),
        )
    if len(labels) == 1:
        raise UsageError(
            f"{folder}: all images have the label {labels[0]!r}, but classification requires two labels",
            fix="add a folder of images for a second label; or set objective.name = masked_reconstruction",
        )
    return files


def _part_names(labels: Sequence[str]) -> list[str]:
    """Return the labels that name a part instead: if all labels do, or if they name both parts."""
    names = [label for label in labels if image_listing.part_of(label)]
    parts = {image_listing.part_of(name) for name in names}
    return names if len(names) == len(labels) or len(parts) == len(DataSplit) else []


def _fix_of_parts(folder: Path, names: Sequence[str]) -> str:
    nested = [name for name in names if image_listing.folders_in(folder / name)]
    sort = [f"put the images of {name} into folders such as {name}/cat" for name in names if name not in nested]
    use = [f"set data.source to {folder / name}" for name in nested[:1]]
    return "; or ".join([*use, " and ".join(sort) or "add folders for both parts: train, and val or test"])


def prepare_folder(folder: Path, side: int, held_out: float, say: Callable[[str], None], labelled: bool = True) -> Path:
    """Return the cache folder with the images of `folder` as arrays, `side` pixels high and wide.

    Images are decoded if they are not cached, or if the name, size or modification time of a file has changed. Raises
    UsageError like `image_files`, and if no image of a label can be read.
    """
    pillow()
    files = image_files(folder, labelled)
    state, labels = image_listing.folder_state(file.path.absolute() for file in files), [file.label for file in files]
    key = cache_key("images", FORMAT, side, held_out, str(folder.absolute()), state, labels)
    what = f"the images of {folder}"
    size = len(files) * 3 * side**2
    built = open_or_build(key, what, lambda into: _build(folder, files, side, held_out, into, say), say, size)
    manifest = read_manifest(built)
    if labelled and manifest["unread"]:
        raise UsageError(
            f"{folder}: no image of the label {manifest['unread'][0]!r} can be read",
            fix="add readable images to its folder; or remove the folder",
        )
    refuse_empty(str(folder), manifest["images"], held_out)
    return built


def _listed(folder: Path, labelled: bool) -> Iterator[ImageFile]:
    for part, root in image_listing.split_folders(folder, labelled):
        if not labelled:
            images = (path for path in sorted(root.iterdir()) if image_listing.is_image_name(path.name))
            yield from (ImageFile(path, "", part) for path in images if not path.is_dir())
        for label, inner in image_listing.folders_in(root).items():
            shown = printable(label)
            yield from (ImageFile(path, shown, part) for path in image_listing.images_below(inner))


def _build(
    folder: Path, files: list[ImageFile], side: int, held_out: float, into: Path, say: Callable[[str], None]
) -> None:
    labels, left_out = sorted({file.label for file in files}), SkippedFiles()
    used: Counter[str] = Counter()
    names: dict[DataSplit, list[str]] = {part: [] for part in DataSplit}

    def images() -> Iterator[tuple[DataSplit, np.ndarray, int]]:
        for file in files:
            try:
                pixels = decode(file.path, side)
                part = file.part or image_listing.part_by_hash(file.path, held_out)
            except (ImageDecodeError, OSError) as error:
                left_out.add(file.path.relative_to(folder), error)
                continue
            used[file.label] += 1
            names[part].append(printable(str(file.path.relative_to(folder))))
            yield part, pixels, labels.index(file.label)

    with build_folder(into) as temporary:
        counts = write_arrays(temporary, labels, images())
        for part, own in names.items():
            (temporary / names_file(part)).write_text(json.dumps(own), encoding="utf-8")
        if left_out.count:
            say(f"{left_out.count} of {len(files)} image files are left out: {left_out}")
        unread = [label for label in labels if not used[label]]
        about = {"source": printable(str(folder)), "left_out": left_out.count, "named": left_out.named}
        write_manifest(temporary, {"format": FORMAT, "images": counts, **about, "unread": unread})


def refuse_empty(source: str, counts: Mapping[str, int], held_out: float) -> None:
    """Raise UsageError if there is no training image or no held-out image."""
    if not counts[DataSplit.TRAIN] or not counts[DataSplit.HELD_OUT]:
        what = "to train on" if not counts[DataSplit.TRAIN] else f"when {held_out:.0%} are held out for evaluation"
        change = "raise" if counts[DataSplit.TRAIN] else "lower"
        raise UsageError(f"{source}: no image is left {what}", fix=f"add images; or {change} data.held_out")
