"""Cache of a user's images with captions. Images are decoded once.

Images without a caption, captions without an image, and unreadable files are left out. Messages count and name the
left-out files.
"""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from thrifty.core.recipe import DataSettings
from thrifty.data.data_cache import build_folder
from thrifty.data.images.image_decoding import ImageDecodeError, decode, pillow
from thrifty.data.images.image_folder import refuse_empty
from thrifty.data.images.image_listing import part_by_hash
from thrifty.data.pairs.caption_tables import CaptionedRow
from thrifty.data.pairs.captioned_arrays import clean_caption, write_captioned
from thrifty.data.pairs.captioned_sources import CaptionedSource
from thrifty.data.prepared_cache import cache_key, open_or_build, read_manifest, write_manifest
from thrifty.data.skipped_files import SkippedFiles, printable
from thrifty.data.train_split import DataSplit

FORMAT = 1


def prepare_captioned(source: CaptionedSource, settings: DataSettings, side: int, say: Callable[[str], None]) -> Path:
    """Return the cache folder of a source's captions and image arrays, `side` pixels high and wide.

    Raises UsageError if no image with a caption is left.
    """
    pillow()
    key = cache_key("image pairs", FORMAT, side, settings.held_out, settings.column, source.identity())
    what = f"the images and captions of {settings.source}"
    built = open_or_build(key, what, lambda into: _build(source, settings, side, into, say), say)
    manifest = read_manifest(built)
    why = ", ".join(f"{kind}: {count}" for kind, count in manifest["left_out"].items())
    refuse_empty(settings.source + (f" ({why})" if why else ""), manifest["images"], settings.held_out)
    return built


def _build(source: CaptionedSource, settings: DataSettings, side: int, into: Path, say: Callable[[str], None]) -> None:
    reading = CaptionedImport(source, side, settings.held_out)
    with build_folder(into) as temporary:
        counts = write_captioned(temporary, reading.images())
        skipped = {kind: left_out for kind, left_out in reading.left_out.items() if left_out.count}
        for kind, left_out in skipped.items():
            say(f"left out, {kind}: {left_out.count} ({left_out})")
        if reading.outside:
            first, count = printable(str(reading.outside[0])), len(reading.outside)
            say(f"{count} images are outside of the table's folder, by their absolute paths; the first: {first}")
        left_out_counts = {kind: left_out.count for kind, left_out in skipped.items()}
        named = [name for left_out in skipped.values() for name in left_out.named]
        about = {"source": printable(settings.source), "images": counts, "left_out": left_out_counts, "named": named}
        write_manifest(temporary, {"format": FORMAT, **about})


class CaptionedImport:
    """One pass over a source. The pass yields every image once, and counts the rows that are left out.

    The captions of an image are complete at the end of the pass.
    """

    def __init__(self, source: CaptionedSource, side: int, held_out: float):
        self.source, self.side, self.share = source, side, held_out
        self.captions: dict[Path | bytes, list[str]] = {}
        self.parts: dict[Path | bytes, DataSplit] = {}
        self.no_image, self.no_caption, self.unreadable = SkippedFiles(), SkippedFiles(), SkippedFiles()
        self.outside: list[Path] = []
        self.left_out = {
            "captions without an image": self.no_image,
            "images without a caption": self.no_caption,
            "images or captions that cannot be read": self.unreadable,
        }

    def images(self) -> Iterator[tuple[DataSplit, np.ndarray, list[str]]]:
        """Yield part, pixels and caption list of each image. Caption lists grow until the end of the pass."""
        without_caption: dict[Path | bytes, str] = {}
        broken: set[Path | bytes] = set()
        for row in self.source.rows():
            own = [text for each in row.captions if (text := clean_caption(each))]
            if row.why:
                self.unreadable.add(row.name, row.why)
            elif row.image is None:
                self.no_image.add(row.name, "no image")
            elif (image := _image_id(row.image)) in broken:
                continue
            elif not own:
                without_caption.setdefault(image, row.name)
            elif row.part and self.parts.get(image, row.part) is not row.part:
                self.unreadable.add(row.name, f"its image is already in the other part, {self.parts[image]}")
            elif (captions := self.captions.get(image)) is not None:
                captions += [text for text in own if text not in captions]
            elif (pixels := self._decoded(row, row.image)) is not None:
                self.captions[image] = list(dict.fromkeys(own))
                self.outside += [row.image] if row.outside and isinstance(row.image, Path) else []
                self.parts[image] = row.part or part_by_hash(row.image, self.share)
                yield self.parts[image], pixels, self.captions[image]
            else:
                broken.add(image)
        for image, name in without_caption.items():
            if image not in self.captions:
                self.no_caption.add(name, "no caption")

    def _decoded(self, row: CaptionedRow, image: Path | bytes) -> np.ndarray | None:
        try:
            if isinstance(image, Path) and not image.exists():
                self.no_image.add(row.name, "no such file")
                return None
            return decode(image, self.side)
        except (ImageDecodeError, OSError) as error:
            self.unreadable.add(row.name, error)
            return None


def _image_id(image: Path | bytes) -> Path | bytes:
    return hashlib.blake2b(image, digest_size=16).digest() if isinstance(image, bytes) else image
