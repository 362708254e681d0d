"""Which model a recipe means: its shape, known before anything is built."""

from dataclasses import replace
from pathlib import Path

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.model_spec import ImageModelSpec, ModelSpec, PairModelSpec, TextModelSpec
from thrifty.core.recipe import ModelSettings
from thrifty.models.families import FAMILIES
from thrifty.models.families.vit_mae import encoder_shape
from thrifty.models.model_config import ModelConfig
from thrifty.models.model_presets import resized, shape_of
from thrifty.models.weight_conversion import folder_shape

_SEEING = ("vit", "clip", "mae")
"""Styles of models that take images."""


def model_shape(settings: ModelSettings, vocabulary: int, length: int) -> ModelConfig | None:
    """The shape of a model of text, see `shape_for`."""
    return shape_for(TextModelSpec(vocabulary, length), settings)


def shape_for(ends: ModelSpec, settings: ModelSettings) -> ModelConfig | None:
    """The shape of the run's model; None for an architecture that only `transformers`, or the user, knows."""
    if settings.build or (isinstance(ends, TextModelSpec) and ends.labels):
        return None
    images = ends.images if isinstance(ends, PairModelSpec) else ends if isinstance(ends, ImageModelSpec) else None
    text = ends.text if isinstance(ends, PairModelSpec) else ends
    vocabulary, length = (
        (len(text.labels) or 1, 1) if isinstance(text, ImageModelSpec) else (text.vocabulary, text.length)
    )
    if not settings.folder:
        return shape_of(settings, vocabulary, length, images)
    _refuse_sizes_of_a_trained_model(settings, but="pool")
    try:
        shape = folder_shape(Path(settings.folder), settings.reinitialize)
    except RefusedError:  # a variant our model does not compute, which transformers may
        return None
    if shape.style == "mae" and images is not None and images.labels:
        shape = encoder_shape(shape, settings.pool or "class", len(images.labels))
    else:
        _refuse_sizes_of_a_trained_model(settings)
    if settings.reinitialize:
        return replace(resized(shape, settings, images), vocabulary=vocabulary, length=length)
    if shape.style in ("vit", "mae"):
        return shape if images is None else _seeing(settings.folder, shape, images)
    if shape.style == "clip" and images is not None:
        shape = _seeing(settings.folder, shape, images)
    limit = shape.length if FAMILIES[shape.style].bounded else length
    check_fit(settings.folder, shape.vocabulary, limit, vocabulary, length)
    return shape


def own_sizes(settings: ModelSettings) -> tuple[int | None, int | None]:
    """Sides of the images that a model was made for and of the patches it cuts them into; None where it takes none."""
    if settings.build:
        return None, None
    shape = own_shape(settings)
    return (shape.image, shape.patch) if shape.style in _SEEING else (None, None)


def own_shape(settings: ModelSettings) -> ModelConfig:
    """The shape of a model before any data is known."""
    if not settings.folder:
        shape = shape_of(replace(settings, patch=None))
        if not settings.patch or shape.style not in _SEEING:
            return shape_of(settings)
        # where nobody else says how large images are: as many whole patches as those of the preset have room for
        side = max(shape.image // settings.patch, 1) * settings.patch
        return replace(shape, patch=settings.patch, image=side)
    shape = folder_shape(Path(settings.folder), fresh=True)
    return resized(shape, replace(settings, pool=None)) if settings.reinitialize else shape


def stated_sizes(settings: ModelSettings) -> list[str]:
    """Names of the sizes that a recipe states itself, which only a model made afresh can have."""
    names = (
        "depth", "width", "heads", "kv_heads", "hidden", "tied", "patch", "pool", "decoder_depth", "decoder_width",
        "text_depth", "text_width", "text_heads",
    )  # fmt: skip
    return [name for name in names if getattr(settings, name) is not None]


def _refuse_sizes_of_a_trained_model(settings: ModelSettings, but: str = "") -> None:
    sizes = [name for name in stated_sizes(settings) if name != but]
    if sizes and not settings.reinitialize:
        raise UsageError(
            f"model.{sizes[0]} is given, and the weights in {settings.folder} have their own",
            fix=f"leave model.{sizes[0]} out, or set model.reinitialize = true to start from random weights",
        )


def _seeing(folder: str, shape: ModelConfig, images: ImageModelSpec) -> ModelConfig:
    """The shape of a trained model once it is refitted to these images."""
    if shape.channels != images.channels:
        raise UsageError(
            f"the images have {images.channels} channels and the model in {folder} takes {shape.channels}",
            fix="set model.reinitialize = true to start from random weights, or choose another model",
        )
    labels = shape.vocabulary if shape.style == "clip" else len(images.labels) or shape.vocabulary
    return replace(shape, vocabulary=labels, image=images.side)


def check_fit(folder: str, own_vocabulary: int, own_length: int, vocabulary: int, length: int) -> None:
    """Raises UsageError where the data has more tokens, or longer rows, than the weights in `folder` know."""
    if vocabulary > own_vocabulary:
        raise UsageError(
            f"the data's tokenizer has {vocabulary} tokens and the model in {folder} has {own_vocabulary}",
            fix=f"use the model's own: data.tokenizer = {str(Path(folder) / 'tokenizer.json')!r}",
        )
    if length > own_length:
        raise UsageError(
            f"data.length is {length} and the model in {folder} takes {own_length} tokens",
            fix=f"set data.length to {own_length} or less",
        )
