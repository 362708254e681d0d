"""Arrays of images with captions: a folder with the arrays of `image_arrays.py` and the captions of each part.

train_captions.jsonl, held_out_captions.jsonl   one line for each image: the list of its captions
"""

import json
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from thrifty.data.images.image_arrays import write_arrays
from thrifty.data.train_split import DataSplit


def clean_caption(text: str) -> str:
    """Return a caption on one line. Replace white space and control characters by single spaces."""
    return " ".join("".join(" " if unicodedata.category(sign) == "Cc" else sign for sign in text).split())


def captions_file(part: DataSplit) -> str:
    return f"{part}_captions.jsonl"


def write_captioned(
    folder: Path, images: Iterable[tuple[DataSplit, np.ndarray, list[str]]], **also: Any
) -> dict[DataSplit, int]:
    """Write images with their parts and captions to the files of a folder, see `write_arrays`.

    The caption list of an image may grow until `images` is exhausted.
    """
    captions: dict[DataSplit, list[list[str]]] = {part: [] for part in DataSplit}

    def pixels() -> Iterator[tuple[DataSplit, np.ndarray, int]]:
        for part, image, own in images:
            captions[part].append(own)
            yield part, image, 0

    counts = write_arrays(folder, (), pixels(), **also)
    for part, rows in captions.items():
        lines = (json.dumps(own, ensure_ascii=False) + "\n" for own in rows)
        (folder / captions_file(part)).write_text("".join(lines), encoding="utf-8")
    return counts


def read_captions(folder: Path, part: DataSplit) -> Iterator[list[str]]:
    with (folder / captions_file(part)).open(encoding="utf-8") as file:
        yield from map(json.loads, file)
