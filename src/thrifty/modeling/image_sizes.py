"""Images whose size changes from step to step."""

from collections.abc import Callable

from torch import Tensor

from thrifty.core.batches import Batch, BatchSource, MappedSource
from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import add_note

IMAGES = "inputs"
"""Field of a batch with images (b, c, h, w) or (b, h, w). In a user's own data, images are the only field with shape
(b, c, h, w)."""


def _field_of_images(batch: Batch) -> str | None:
    if IMAGES in batch.fields:
        return IMAGES if batch[IMAGES].ndim in (3, 4) else None
    images = [name for name, tensor in batch.fields.items() if tensor.ndim == 4]
    sides = {batch[name].shape[-2:] for name in images}
    maps = [name for name, tensor in batch.fields.items() if tensor.ndim > 2 and tensor.shape[-2:] in sides]
    if len(maps) > 1:
        raise RefusedError(
            f"a batch has several fields with images or maps of their size: {', '.join(maps)}",
            fix="keep only one of them in the batch, with shape (b, c, h, w)",
        )
    return images[0] if images else None


def images_of(batch: Batch) -> Tensor | None:
    """Return the images of a batch; None if there are no images. Raise RefusedError for images that are not floats."""
    if (field := _field_of_images(batch)) is None:
        return None
    images = batch[field]
    if not images.is_floating_point():
        raise RefusedError(
            f"the images are {images.dtype}, not floats", fix="pass images as floats from 0 (black) to 1 (white)"
        )
    return images


def replace_images(batch: Batch, images: Tensor) -> Batch:
    return Batch({**batch.fields, _field_of_images(batch) or IMAGES: images}, batch.weight, batch.last)


def resized_images(
    source: BatchSource, who: str, side_at: Callable[[int, int], int], resized: Callable[[Tensor, int, int], Tensor]
) -> BatchSource:
    """Return a source whose images at each step are `resized(images, height, width)`. `side_at(step, side)` returns the
    size at `step` for a full side of `side` pixels. Add a note if the first images have their full size. Raise
    RefusedError for batches without images; `who` is the technique that the message names."""

    def change(step: int, batch: Batch) -> Batch:
        images = images_of(batch)
        if images is None:
            fields = " and ".join(sorted(batch.fields.keys() - {"key"}))
            raise RefusedError(
                f"{who} requires batches of images; these have {fields}", fix=f"train on images; or --without {who}"
            )
        sides = images.shape[-2:]
        if all(side_at(0, side) == side for side in sides):
            add_note(
                f"images of {sides[0]} x {sides[1]} have their full size from the start: lower multiple or the "
                "initial size"
            )
        return replace_images(batch, resized(images, *(side_at(step, side) for side in sides)))

    return MappedSource(source, change)
