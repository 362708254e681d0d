"""The shape of a recipe's model, computed before the model is built."""

from dataclasses import replace
from pathlib import Path

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.model_spec import ImageModelSpec, ModelSpec, PairModelSpec, TextModelSpec, UserModelSpec
from thrifty.core.recipe import ModelSettings, Recipe
from thrifty.models.families import FAMILIES
from thrifty.models.families.vit_mae import encoder_shape
from thrifty.models.hf_folder import image_sizes, read_config
from thrifty.models.model_config import ModelConfig
from thrifty.models.model_presets import resized, shape_of
from thrifty.models.weight_conversion import folder_shape
from thrifty.models.wrapped_autoencoder import patch_side

_IMAGE_STYLES = ("vit", "clip", "mae")
"""Values of `ModelConfig.style` for models with images as input."""


def model_shape(settings: ModelSettings, vocabulary: int, length: int) -> ModelConfig | None:
    """Return the shape of a text model, see `shape_for`."""
    return shape_for(TextModelSpec(vocabulary, length), settings)


def shape_for(ends: ModelSpec, settings: ModelSettings) -> ModelConfig | None:
    """Return the shape of the run's model; None for an architecture of `transformers` or of the user."""
    if settings.build or (isinstance(ends, TextModelSpec) and ends.labels):
        return None
    if isinstance(ends, UserModelSpec):
        return own_shape(settings)
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
    except RefusedError:  # a variant that only transformers supports
        return None
    if shape.style == "clip" and isinstance(ends, ImageModelSpec):  # transformers adds a head to its image tower
        return None
    if shape.style == "mae" and images is not None and images.labels:
        shape = encoder_shape(shape, settings.pool or "class", len(images.labels))
    else:
        _refuse_sizes_of_a_trained_model(settings)
    if settings.reinitialize:
        return replace(resized(shape, settings, images), vocabulary=vocabulary, length=length)
    if shape.style in ("vit", "mae"):
        return shape if images is None else _refitted(settings.folder, shape, images)
    if shape.style == "clip" and images is not None:
        shape = _refitted(settings.folder, shape, images)
    limit = shape.length if FAMILIES[shape.style].bounded else length
    check_fit(settings.folder, shape.vocabulary, limit, vocabulary, length)
    return shape


def own_sizes(settings: ModelSettings) -> tuple[int | None, int | None]:
    """Return the sides of images and patches in pixels; (None, None) for a model without images, and for the user's
    own."""
    if settings.build:
        return None, None
    try:
        shape = own_shape(settings)
    except RefusedError:  # an architecture that transformers may know
        return image_sizes(read_config(Path(settings.folder)))
    return (shape.image, shape.patch) if shape.style in _IMAGE_STYLES else (None, None)


def patch_side_in(recipe: Recipe, images: ImageModelSpec) -> int | None:
    """Return the side of a patch in pixels; None for a model without patches. The user's own model is asked only by
    masked reconstruction."""
    model = recipe.objects.model
    if model is None or recipe.objective.name != "masked_reconstruction":
        return own_sizes(recipe.model)[1]
    return patch_side(recipe.objects.build_model(recipe.model.arguments), images.side, images.channels)


def sees_images(settings: ModelSettings) -> bool | None:
    """Return True if the inputs of a model are images; None if this is unknown."""
    if settings.build:
        return None
    try:
        return own_shape(settings).style in _IMAGE_STYLES
    except RefusedError:  # an architecture that transformers may know
        config = read_config(Path(settings.folder))
        return "ForImageClassification" in str(config.get("architectures")) or "num_channels" in config
    except UsageError:  # an invalid model, which is refused later
        return None


def own_shape(settings: ModelSettings) -> ModelConfig:
    """Return the shape (`ModelConfig`) that the settings define without data."""
    if not settings.folder:
        shape = shape_of(replace(settings, patch=None))
        if not settings.patch or shape.style not in _IMAGE_STYLES:
            return shape_of(settings)
        # without data: as many whole patches as fit into the images of the preset
        side = max(shape.image // settings.patch, 1) * settings.patch
        return replace(shape, patch=settings.patch, image=side)
    shape = folder_shape(Path(settings.folder), fresh=True)
    return resized(shape, replace(settings, pool=None)) if settings.reinitialize else shape


def stated_sizes(settings: ModelSettings) -> list[str]:
    """Return the names of the sizes that a recipe sets. With pretrained weights, sizes cannot be set."""
    names = (
        "depth", "width", "heads", "kv_heads", "hidden", "tied", "patch", "pool", "decoder_depth", "decoder_width",
        "text_depth", "text_width", "text_heads",
    )  # fmt: skip
    return [name for name in names if getattr(settings, name) is not None]


def _refuse_sizes_of_a_trained_model(settings: ModelSettings, but: str = "") -> None:
    sizes = [name for name in stated_sizes(settings) if name != but]
    if sizes and not settings.reinitialize:
        raise UsageError(
            f"model.{sizes[0]} is set, but the pretrained weights in {settings.folder!r} determine it",
            fix=f"leave model.{sizes[0]} out; or set model.reinitialize = true to start from random weights",
        )


def _refitted(folder: str, shape: ModelConfig, images: ImageModelSpec) -> ModelConfig:
    """Return the shape of a trained model after adaptation to `images`."""
    if shape.channels != images.channels:
        raise UsageError(
            f"the images have {images.channels} channels, but the model in {folder!r} has {shape.channels}",
            fix="set model.reinitialize = true to start from random weights; or choose another model",
        )
    labels = shape.vocabulary if shape.style == "clip" else len(images.labels) or shape.vocabulary
    return replace(shape, vocabulary=labels, image=images.side)


def check_fit(folder: str, own_vocabulary: int, own_length: int, vocabulary: int, length: int) -> None:
    """Raise UsageError if the data need a larger vocabulary or a longer context than the weights in `folder` have."""
    if vocabulary > own_vocabulary:
        raise UsageError(
            f"the data's tokenizer has {vocabulary} tokens, but the model in {folder!r} has {own_vocabulary}",
            fix=f"use the tokenizer of the model: data.tokenizer = {str(Path(folder) / 'tokenizer.json')!r}",
        )
    if length > own_length:
        raise UsageError(
            f"data.length is {length}, but the model in {folder!r} is limited to {own_length} tokens",
            fix=f"--length {own_length}, or less",
        )
