"""Image data of a recipe: opened, decoded and ready for training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import BatchSource
from thrifty.core.errors import UsageError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.objective import Objective
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.data.catalogue import CatalogueEntry, entries
from thrifty.data.data_cache import file_sha256
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.epoch_sampler import EpochsByKey, HeldOutByKey, HeldOutExamples
from thrifty.data.fetched_sets import read_origin
from thrifty.data.images import digits
from thrifty.data.images.augmentation import mix_examples, partners
from thrifty.data.images.image_arrays import ChannelStatistics, ImageArrays, normalized, open_arrays
from thrifty.data.images.image_folder import prepare_folder
from thrifty.data.images.image_listing import has_image_files, image_share
from thrifty.data.images.image_previews import input_pictures, picture
from thrifty.data.prepared_cache import read_manifest, refuse_less_than_a_batch
from thrifty.data.run_data import ExamplePreview
from thrifty.data.run_metadata import image_metadata
from thrifty.data.train_split import DataSplit, label_entropy

DIGITS = "digits"
LABELS = "labels"
"""Key of the label names in `identity`."""


def holds_images(source: str) -> bool:
    """Return True for a known image set (with labels or captions), and for a folder with image files."""
    if source == DIGITS or (source in entries() and entries()[source].kind in ("images", "pairs")):
        return True
    path = Path(source).expanduser()
    return source not in entries() and path.is_dir() and has_image_files(path)


def holds_mainly_images(source: str) -> bool:
    """Return True for a known image set, and for a folder in which most files have an image suffix."""
    path = Path(source).expanduser()
    return holds_images(source) and (source in (DIGITS, *entries()) or image_share(path) > 0.5)


class TrainingImages(EpochsByKey):
    """Augmented images in epochs, as a pure function of (seed, number of the example in the run).

    {"inputs": (b, c, h, w), "labels": (b,), "key": (b,)}. Mixed images have label weights (b, v) for v labels. There is
    no field "labels" for unlabelled images. The key seeds the random values of the example.
    """

    contents: ImageArrays

    def __init__(self, contents: ImageArrays, batch: int, seed: int, how: AugmentationSettings | None = None):
        super().__init__(contents, batch, seed)
        self.how = how

    def keyed_fields(self, chosen: np.ndarray, keys: np.ndarray) -> dict[str, Tensor]:
        if self.how is None:
            return self.contents.fields(chosen)
        ends = self.contents.ends
        images = self.contents.changed(chosen, keys, self.how)
        if not ends.labels:
            return {"inputs": normalized(images, ends)}
        labels = self.contents.labels_of(chosen)
        if self.how.mixup or self.how.cutmix:
            other, other_keys = partners(keys, self.examples)
            other = self.places(other)
            others = self.contents.changed(other, other_keys, self.how)
            images, own = mix_examples(images, others, keys, self.how)
            one, another = (
                torch.nn.functional.one_hot(each, len(ends.labels)).float()
                for each in (labels, self.contents.labels_of(other))
            )
            labels = another + own[:, None] * (one - another)
        return {"inputs": normalized(images, ends), "labels": labels}


@dataclass(frozen=True)
class ImageData:
    """Opened images, see `run_data.RunData`."""

    source: str
    train: BatchSource
    held_out: HeldOutExamples
    ends: ImageModelSpec
    identity: Mapping[str, str]
    parts: Mapping[DataSplit, ImageArrays]
    frequencies_entropy: float | None = None
    """Cross-entropy of held-out labels under the training frequencies, in nats per image; None without labels."""
    left_out: int = 0
    """Number of unreadable image files."""
    named: tuple[str, ...] = ()
    """Names of the first thousand unreadable files, each with the reason."""

    example_unit = 1

    @property
    def facts(self) -> dict[str, Any]:
        known = {} if self.frequencies_entropy is None else {"label_entropy": self.frequencies_entropy}
        return {"unit": "images", **known}

    def description(self) -> dict[str, Any]:
        return {
            "train_images": len(self.parts[DataSplit.TRAIN]),
            "held_out_images": len(self.parts[DataSplit.HELD_OUT]),
            "labels": list(self.ends.labels),
            "side": self.ends.side,
            "channels": self.ends.channels,
            "label_entropy": self.frequencies_entropy,
            "left_out": self.left_out,
            "named": list(self.named),
        }

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        arrays, places = self.parts[DataSplit.TRAIN], np.array(numbers, np.int64)
        names, files = self.ends.labels, arrays.names
        return [
            ExamplePreview(
                number=number,
                picture=picture(image),
                label=names[label] if names else "",
                file=files[number] if files else "",
            )
            for number, image, label in zip(numbers, arrays.shown(places), arrays.labels[places].tolist(), strict=True)
        ]

    def pictures(self, inputs: Tensor) -> list[str]:
        return input_pictures(inputs, self.ends)

    def metadata(self) -> dict[str, str]:
        return image_metadata(self.ends)

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        if before.get(LABELS) != self.identity[LABELS]:
            raise UsageError(
                "the fork has other labels than the old run, so outputs would change their meaning",
                fix="use the old names of the image folders; or start a new run",
            )


def open_images(
    settings: DataSettings,
    seed: int,
    side: int | None,
    say: Callable[[str], None],
    labelled: bool = True,
    normalized_as: Callable[[ImageModelSpec], ImageModelSpec] = lambda ends: ends,
) -> ImageData:
    """Open the images of a recipe. The first time, images of a folder are decoded into the cache.

    `side` is the default size in pixels for images of a folder. Without `labelled`, labels are optional and not
    returned. `normalized_as` returns a specification with another mean and standard deviation. Raises UsageError for an
    invalid source or setting, and for fewer images than one batch.
    """
    if settings.tokenizer:
        raise UsageError(f"data.tokenizer is set, but {settings.source!r} holds images", fix="leave data.tokenizer out")
    _refuse_mixing(settings, labelled)
    parts, identity, facts = _open(settings, settings.size or side, say, labelled)
    if not labelled:
        parts = {part: arrays.unlabelled() for part, arrays in parts.items()}
    parts = {part: replace(arrays, ends=normalized_as(arrays.ends)) for part, arrays in parts.items()}
    train, held_out = (parts[part] for part in DataSplit)
    refuse_less_than_a_batch(settings, len(train), f"has {len(train)} images")
    labels = train.ends.labels
    return ImageData(
        source=settings.source,
        train=TrainingImages(train, settings.batch, seed, settings.augment),
        held_out=HeldOutByKey(held_out),
        ends=train.ends,
        identity={**identity, LABELS: "/".join(labels)},
        parts=parts,
        frequencies_entropy=label_entropy(train.labels, held_out.labels, len(labels)) if labels else None,
        left_out=facts.get("left_out", 0),
        named=tuple(facts.get("named", ())),
    )


Opened = tuple[dict[DataSplit, ImageArrays], dict[str, str], dict[str, Any]]
"""Arrays, the sha256 of the array files, and other facts from the manifest."""


def _open(settings: DataSettings, side: int | None, say: Callable[[str], None], labelled: bool) -> Opened:
    if settings.source == DIGITS:
        return _digits(settings.size), {digits.STORED.name: file_sha256(digits.STORED)}, {}
    if settings.source in entries():
        return _fetched(entries()[settings.source], settings.size, labelled)
    folder = prepare_folder(Path(settings.source).expanduser(), known_side(side), settings.held_out, say, labelled)
    manifest = read_manifest(folder)
    return open_arrays(folder), {name: file["sha256"] for name, file in manifest["files"].items()}, manifest


def known_side(side: int | None) -> int:
    """Return the side of images in pixels. Raises UsageError if the side is unknown."""
    if side is None:
        raise UsageError("neither the data nor the model determines the image size", fix="--set data.size=64")
    return side


def _fetched(entry: CatalogueEntry, side: int | None, labelled: bool) -> Opened:
    if labelled and entry.kind == "pairs":
        raise UsageError(
            f"{entry.name!r} holds images with captions, but no labels", fix="set objective.name = contrastive"
        )
    if not entry.present:
        raise UsageError(f"the set {entry.name!r} is not on this machine yet", fix=f"thrifty data get {entry.name}")
    return open_arrays(entry.folder, side), read_origin(entry)["files"], {}


def _digits(side: int | None) -> dict[DataSplit, ImageArrays]:
    splits = {DataSplit.TRAIN: digits.DigitImages("train"), DataSplit.HELD_OUT: digits.DigitImages("test")}
    pixels = {part: (split.images * digits.BRIGHTEST).byte().numpy()[:, None] for part, split in splits.items()}
    channels = ChannelStatistics()
    for image in pixels[DataSplit.TRAIN]:
        channels.add(image)
    size = pixels[DataSplit.TRAIN].shape[-1]
    ends = ImageModelSpec(digits.DIGITS, side or size, 1, *channels.statistics(digits.BRIGHTEST))
    return {
        part: ImageArrays(pixels[part], split.labels.numpy(), ends, digits.BRIGHTEST) for part, split in splits.items()
    }


def _refuse_mixing(settings: DataSettings, labelled: bool) -> None:
    how = settings.augment
    if how is not None and not labelled and (how.mixup or how.cutmix):
        name = "mixup" if how.mixup else "cutmix"
        raise UsageError(
            f"data.augment.{name} mixes labels of images, but the objective uses none",
            fix=f"leave data.augment.{name} out",
        )


class Images(DataKind):
    """Images, with or without labels."""

    name, own_settings, is_visual = "images", ("size", "augment"), True
    about, recipe, overrules = "images", "vit-digits", True

    def holds(self, settings: DataSettings) -> bool:
        return holds_images(settings.source)

    def is_main(self, settings: DataSettings) -> bool:
        return holds_mainly_images(settings.source)

    def open(self, request: DataRequest) -> tuple[Objective, ImageData]:
        recipe = request.recipe
        labelled = request.objective.needs_labels
        data = open_images(recipe.data, recipe.seed, request.image_side, request.say, labelled, request.normalized_as)
        objective = request.objective.with_patch_size(request.patch_side(data.ends))
        return objective, replace(data, held_out=data.held_out.shaped(objective.examples))
