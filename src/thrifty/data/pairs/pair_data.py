"""Image-text pairs of a recipe: opened, decoded once into the cache, and ready for training.

If the source is not split, images are split by a hash of each file, so copies of an image belong to the same part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from thrifty.core.batches import BatchSource, ExampleIndex
from thrifty.core.errors import RefusedError, UsageError, did_you_mean
from thrifty.core.model_spec import ImageModelSpec, PairModelSpec, TextModelSpec
from thrifty.core.objective import Objective
from thrifty.core.recipe import AugmentationSettings, DataSettings
from thrifty.data.catalogue import entries
from thrifty.data.data_kind import DataKind, DataRequest
from thrifty.data.epoch_sampler import EpochsByKey, HeldOutByKey, fingerprint
from thrifty.data.fetched_sets import read_origin
from thrifty.data.images.image_arrays import ImageArrays, normalized, open_arrays
from thrifty.data.images.image_data import known_side
from thrifty.data.images.image_previews import input_pictures
from thrifty.data.pairs.caption_rows import CaptionRows, open_captions, prepare_captions
from thrifty.data.pairs.captioned_cache import prepare_captioned
from thrifty.data.pairs.captioned_sources import holds_captioned, open_captioned
from thrifty.data.prepared_cache import read_manifest, refuse_less_than_a_batch
from thrifty.data.run_data import ExamplePreview
from thrifty.data.run_metadata import image_metadata, refuse_other_tokenizer
from thrifty.data.tokenizer import TextTokenizer, check_vocabulary
from thrifty.data.train_split import DataSplit


def holds_image_pairs(source: str) -> bool:
    """Return True for a known data set, a file or a folder of images with captions."""
    return entries()[source].kind == "pairs" if source in entries() else holds_captioned(source)


@dataclass(frozen=True)
class CaptionedImages:
    """Images with captions of the training or held-out part, as `IndexedExamples`."""

    images: ImageArrays
    captions: CaptionRows

    def __len__(self) -> int:
        return len(self.images)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return images without augmentation and their first captions.

        {"inputs": (b, c, h, w), "tokens": (b, t), "keep": (b, t)}.
        """
        return {**self.images.fields(indices), **self.captions.fields(indices)}

    def example_index(self) -> ExampleIndex:
        return ExampleIndex(len(self), self._fingerprint)

    @cached_property
    def _fingerprint(self) -> str:
        captions = self.captions
        return fingerprint(self.images.pixels, captions.tokens, captions.ends, captions.counts, also=captions.length)


class TrainingPairs(EpochsByKey):
    """Augmented images in epochs, each with a random caption of the image.

    Examples are a pure function of (seed, number of the example in the run). {"inputs": (b, c, h, w), "tokens": int64
    (b, t), "keep": bool (b, t), "key": int64 (b,)}. End-of-text tokens end a caption and pad its row. "keep" is False
    on padding.
    """

    contents: CaptionedImages

    def __init__(self, contents: CaptionedImages, batch: int, seed: int, how: AugmentationSettings | None = None):
        super().__init__(contents, batch, seed)
        self.how = how

    def keyed_fields(self, chosen: np.ndarray, keys: np.ndarray) -> dict[str, Tensor]:
        images, how = self.contents.images, self.how
        shown = images.shown(chosen) if how is None else images.changed(chosen, keys, how)
        return {"inputs": normalized(shown, images.ends), **self.contents.captions.fields(chosen, keys)}


@dataclass(frozen=True)
class PairData:
    """Opened images with captions, see `run_data.RunData`."""

    source: str
    train: BatchSource
    held_out: HeldOutByKey
    ends: PairModelSpec
    tokenizer: TextTokenizer
    identity: Mapping[str, str]
    parts: Mapping[DataSplit, CaptionedImages]
    left_out: Mapping[str, int]
    """Number of left-out files or rows by reason."""
    named: tuple[str, ...] = ()
    """Names of the first left-out files or rows, each with the reason."""

    example_unit = 1

    @property
    def facts(self) -> dict[str, Any]:
        return {"unit": "images"}

    def description(self) -> dict[str, Any]:
        return {
            "train_images": len(self.parts[DataSplit.TRAIN]),
            "held_out_images": len(self.parts[DataSplit.HELD_OUT]),
            "train_captions": len(self.parts[DataSplit.TRAIN].captions.ends),
            "side": self.ends.images.side,
            "channels": self.ends.images.channels,
            "vocabulary": self.ends.text.vocabulary,
            "length": self.ends.text.length,
            "left_out": sum(self.left_out.values()),
            "named": list(self.named),
        }

    def previews(self, numbers: Sequence[int]) -> list[ExamplePreview]:
        raise RefusedError(
            "images with captions have no previews", fix="set data.source to an image folder, or to a text file"
        )

    def pictures(self, inputs: Tensor) -> list[str]:
        return input_pictures(inputs, self.ends.images)

    def metadata(self) -> dict[str, str]:
        return image_metadata(self.ends.images) | self.tokenizer.files()

    def check_meaning(self, before: Mapping[str, str], old: Path) -> None:
        refuse_other_tokenizer(before, self.identity, old)


def open_image_pairs(
    settings: DataSettings,
    seed: int,
    side: int | None,
    say: Callable[[str], None],
    normalized_as: Callable[[ImageModelSpec], ImageModelSpec] = lambda ends: ends,
) -> PairData:
    """Open the images with captions of a recipe. The first time, images are decoded and captions tokenized.

    `side` is the image size in pixels, unless the settings or a known data set determine the size. Images are
    normalized for the pretrained weights of `model`, if it has any. Raises UsageError for an invalid source or setting,
    and for fewer pairs than one batch.
    """
    if not settings.tokenizer:
        check_vocabulary(settings.vocabulary)
    _refuse_settings(settings)
    folder, identity, facts = _open(settings, settings.size or side, say)
    prepared = prepare_captions(folder, settings, settings.source, say)
    parts = {
        part: CaptionedImages(
            replace(arrays, ends=normalized_as(arrays.ends)), open_captions(prepared, part, settings.length)
        )
        for part, arrays in open_arrays(folder, settings.size).items()
    }
    train = parts[DataSplit.TRAIN]
    refuse_less_than_a_batch(settings, len(train), f"has {len(train)} images")
    if train.captions.cut:
        say(f"{train.captions.cut:.1%} of the captions are longer than data.length = {settings.length} and are cut")
    hashes = {name: file["sha256"] for name, file in prepared.manifest["files"].items()}
    return PairData(
        source=settings.source,
        train=TrainingPairs(train, settings.batch, seed, settings.augment),
        held_out=HeldOutByKey(parts[DataSplit.HELD_OUT]),
        ends=PairModelSpec(train.images.ends, TextModelSpec(prepared.manifest["vocabulary"], settings.length)),
        tokenizer=prepared.tokenizer,
        identity={f"images/{name}": sha256 for name, sha256 in identity.items()} | hashes,
        parts=parts,
        left_out=facts.get("left_out", {}),
        named=tuple(facts.get("named", ())),
    )


def _open(settings: DataSettings, side: int | None, say: Callable[[str], None]) -> tuple[Path, dict, dict]:
    """Return the folder of arrays and captions, the sha256 of the files, and the manifest."""
    if settings.source in entries():
        entry = entries()[settings.source]
        if entry.kind != "pairs":
            pairs = [each.name for each in entries().values() if each.kind == "pairs"]
            raise UsageError(f"{entry.name!r} has no images with captions", fix=did_you_mean(entry.name, pairs))
        if not entry.present:
            raise UsageError(f"the set {entry.name!r} is not on this machine yet", fix=f"thrifty data get {entry.name}")
        return entry.folder, read_origin(entry)["files"], {}
    source = open_captioned(settings.source, settings.column)
    folder = prepare_captioned(source, settings, known_side(side), say)
    manifest = read_manifest(folder)
    return folder, {name: file["sha256"] for name, file in manifest["files"].items()}, manifest


def _refuse_settings(settings: DataSettings) -> None:
    how = settings.augment
    for name in ("mixup", "cutmix"):
        if how is not None and getattr(how, name):
            raise UsageError(
                f"data.augment.{name} mixes labels of images, but captions cannot be mixed",
                fix=f"leave data.augment.{name} out",
            )


class ImagesWithCaptions(DataKind):
    """Images with captions."""

    name, own_settings, is_visual = "pairs", ("size", "augment"), True
    about, recipe = "images with captions", "flip-emoji"

    def holds(self, settings: DataSettings) -> bool:
        return holds_image_pairs(settings.source)

    def open(self, request: DataRequest) -> tuple[Objective, PairData]:
        objective, recipe = request.objective, request.recipe
        data = open_image_pairs(recipe.data, recipe.seed, request.image_side, request.say, request.normalized_as)
        return objective, replace(data, held_out=data.held_out.shaped(objective.examples))
