"""Images per second and core: decoded once into arrays, against files decoded in every epoch.

    python benchmarks/bench_images.py [--images 512] [--batch 128] [--rounds 10] [--json FOLDER]

Both return the same: RGB at the target size, randomly cropped and flipped, normalized, in shuffled batches. The usual
pipeline is a dataset of Pillow operations, as in torchvision's transforms, with a DataLoader without workers, so both
use one thread. Decoding once is timed separately; the usual pipeline pays it in every epoch. Small images are PNG of 32
x 32 pixels; photographs are JPEG of 500 x 375 at 64 x 64 and 160 x 160.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from side_by_side import print_timings, rows, side_by_side, write
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.data.images.image_data import ImageData, open_images

USUAL = "Pillow in every epoch"
CROP = 4
LABELS = ("left", "right")


def write_images(folder: Path, images: int, size: tuple[int, int], suffix: str) -> None:
    """Write images of coarse and fine noise, whose files are about as large as those of photographs."""
    generator = np.random.default_rng(0)
    for number in range(images):
        coarse = generator.integers(0, 256, (8, 8, 3), np.uint8)
        picture = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
        picture += generator.integers(-12, 12, picture.shape, np.int16)
        path = folder / LABELS[number % 2] / f"{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(path)


class Files(Dataset):
    """Dataset of a folder of labels that decodes, fits, crops, flips and normalizes one file at a time."""

    def __init__(self, folder: Path, side: int, data: ImageData):
        self.files = [path for label in LABELS for path in sorted((folder / label).iterdir())]
        self.side, self.mean, self.std = (
            side,
            *(torch.tensor(each).view(3, 1, 1) for each in (data.ends.mean, data.ends.std)),
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.files[index]
        with Image.open(path) as opened:
            opened.draft("RGB", (self.side, self.side))
            image = opened.convert("RGB")
        image = ImageOps.fit(image, (self.side, self.side), Image.Resampling.BILINEAR)
        left, top = torch.randint(2 * CROP + 1, (2,)).tolist()
        image = ImageOps.expand(image, CROP).crop((left, top, left + self.side, top + self.side))
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        return (pixels - self.mean) / self.std, LABELS.index(path.parent.name)


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    before = os.environ.get("THRIFTY_CACHE")
    os.environ["THRIFTY_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["THRIFTY_CACHE"]
        else:
            os.environ["THRIFTY_CACHE"] = before


def batches_of(loader: DataLoader) -> Callable[[], object]:
    """Return a function that returns the next batch, epoch after epoch."""
    endless = (batch for _ in count() for batch in loader)
    return lambda: next(endless)


def compare(folder: Path, side: int, batch: int, rounds: int) -> tuple[dict, float]:
    """Return the timings of a batch, and the seconds to decode all files once."""

    def opened(augment: AugmentationSettings | None) -> ImageData:
        settings = DataSettings(source=str(folder), size=side, batch=batch, held_out=0.01, augment=augment)
        return open_images(settings, 0, None, lambda text: None)

    began = time.perf_counter()
    plain = opened(None)
    once = time.perf_counter() - began
    steps = count()
    kinds = {
        "arrays, cropped and flipped": AugmentationSettings(crop=CROP, flip=True),
        "arrays, as they are": None,
        "arrays, with 2 operations and erasing": AugmentationSettings(crop=CROP, flip=True, operations=2, erase=0.25),
    }
    loader = DataLoader(Files(folder, side, plain), batch, shuffle=True, drop_last=True)
    ways: dict[str, Callable[[], object]] = {USUAL: batches_of(loader)}
    for name, augment in kinds.items():
        source = opened(augment).train
        ways[name] = lambda source=source: source.at(next(steps))
    return side_by_side(ways, rounds), once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="folder for the figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as scratch, own_cache(Path(scratch, "cache")):
        sizes = {"small": ((32, 32), ".png", (32,)), "photographs": ((500, 375), ".jpg", (64, 160))}
        for kind, (size, suffix, sides) in sizes.items():
            folder = Path(scratch, kind)
            write_images(folder, options.images, size, suffix)
            for side in sides:
                timings, once = compare(folder, side, options.batch, options.rounds)
                title = f"{kind}, {suffix} of {size[0]} x {size[1]} pixels at {side}"
                print_timings(title, timings, USUAL, options.batch, "images/s")
                print(f"  decoding once: {options.images / once:,.0f} images/s")
                results[title] = {"decoded_per_second": options.images / once, "batch": rows(timings, USUAL)}
    if options.json:
        facts = {"benchmark": "images", "images_per_batch": options.batch, "threads": 1, "found": results}
        write(options.json / "images-cpu.json", facts)


if __name__ == "__main__":
    main()
