"""Models in plain torch that know no technique, and the one place that decides which model a recipe means."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.ends import Ends, ImageEnds, PairEnds, TextEnds
from thrifty.core.errors import Refused, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.core.sparse.slimming import is_arranged
from thrifty.core.surgery import find_blocks
from thrifty.models.autoencoder import MaskedAutoencoder, encoder_alone
from thrifty.models.contrastive import LARGEST_SCALE, ContrastiveModel
from thrifty.models.evened import evened
from thrifty.models.families import FAMILIES, assemble
from thrifty.models.families.vit_mae import encoder_shape
from thrifty.models.interchange import export_folder, folder_shape, import_folder
from thrifty.models.presets import PRESETS, resized, shape_of
from thrifty.models.shape import Shape
from thrifty.models.transformer import Encoder, EncoderDecoder, Task, Transformer, initialize
from thrifty.models.vision import VisionTransformer, refit

_SEES = {
    "next_token": "no token sees later ones",
    "masked_token": "a token can see later ones",
    "sequence_to_sequence": "it reads a source and writes a target",
    "classify": "it reads images",
    "contrast": "it compares images with captions",
    "reconstruct": "it gives back the pixels of images",
}
_SEEING = ("vit", "clip", "mae")
"""Styles of models that take images."""
_KIND_FOR = {"answer": "next_token", "mass": "sequence_to_sequence"}
"""Objectives that need the same kind of model as another one."""


def build_model(
    settings: ModelSettings,
    vocabulary: int,
    length: int,
    seed: int,
    task: Task | Literal["answer", "mass"] = "next_token",
) -> nn.Module:
    """The plain model of a run on text, see `build_for`."""
    return build_for(TextEnds(vocabulary, length), settings, seed, task)


def build_for(
    ends: Ends, settings: ModelSettings, seed: int, task: Task | Literal["answer", "mass"] = "next_token"
) -> nn.Module:
    """The plain model of a run with its first values, the same at every call.

    A preset, or a folder: what a family of ours computes becomes one of our models, anything else a wrapper around the
    model of `transformers` that learns `task`. A trained model of images is refitted to the images and labels of the
    data; of a trained MAE the encoder is taken where there are labels. Raises UsageError for a model of another kind
    than the task needs, and where the data does not fit weights that exist.
    """
    task = _KIND_FOR.get(task, task)
    shape = shape_for(ends, settings)
    if shape is not None:
        _refuse_another_kind(settings, shape, task)
    if shape is None or (settings.folder and not settings.fresh):
        # values from files are real even where everything else is being counted on fake tensors
        with unset_fake_temporarily():
            if shape is None:
                return _build_other(settings, ends, seed, task)
            model, _ = import_folder(Path(settings.folder))
            if isinstance(model, ContrastiveModel):
                model.image.embedding.resize(shape.image)
            if isinstance(model, MaskedAutoencoder):
                model.resize(shape.image)
                if shape.style == "vit":
                    model = encoder_alone(model, shape.vocabulary, shape.pool)  # type: ignore[arg-type]
                    initialize(model, seed, within="head.")
            if isinstance(model, VisionTransformer) and refit(model, shape.vocabulary, shape.image):
                initialize(model, seed, within="head.")
            return model
    model = assemble(shape)
    initialize(model, seed)
    return model


def model_shape(settings: ModelSettings, vocabulary: int, length: int) -> Shape | None:
    """The shape of a model of text, see `shape_for`."""
    return shape_for(TextEnds(vocabulary, length), settings)


def shape_for(ends: Ends, settings: ModelSettings) -> Shape | None:
    """The shape of the run's model; None for an architecture that only `transformers` knows."""
    images = ends.images if isinstance(ends, PairEnds) else ends if isinstance(ends, ImageEnds) else None
    text = ends.text if isinstance(ends, PairEnds) else ends
    vocabulary, length = (len(text.labels) or 1, 1) if isinstance(text, ImageEnds) else (text.vocabulary, text.length)
    if not settings.folder:
        return shape_of(settings, vocabulary, length, images)
    _refuse_sizes_of_a_trained_model(settings, but="pool")
    try:
        shape = folder_shape(Path(settings.folder), settings.fresh)
    except Refused:  # a variant our model does not compute, which transformers may
        return None
    if shape.style == "mae" and images is not None and images.labels:
        shape = encoder_shape(shape, settings.pool or "class", len(images.labels))
    else:
        _refuse_sizes_of_a_trained_model(settings)
    if settings.fresh:
        return replace(resized(shape, settings, images), vocabulary=vocabulary, length=length)
    if shape.style in ("vit", "mae"):
        return shape if images is None else _seeing(settings.folder, shape, images)
    if shape.style == "clip" and images is not None:
        shape = _seeing(settings.folder, shape, images)
    limit = shape.length if FAMILIES[shape.style].bounded else length
    _check_fit(settings.folder, shape.vocabulary, limit, vocabulary, length)
    return shape


def own_side(settings: ModelSettings) -> int | None:
    """Height and width of the images that a model was made for; None where it does not take images."""
    shape = _own_shape(settings)
    return shape.image if shape.style in _SEEING else None


def own_patch(settings: ModelSettings) -> int | None:
    """Height and width of the patches that a model cuts images into; None where it does not take images."""
    shape = _own_shape(settings)
    return shape.patch if shape.style in _SEEING else None


def _own_shape(settings: ModelSettings) -> Shape:
    if not settings.folder:
        shape = shape_of(replace(settings, patch=None))
        if not settings.patch or shape.style not in _SEEING:
            return shape_of(settings)
        # where nobody else says how large images are: as many whole patches as those of the preset have room for
        side = max(shape.image // settings.patch, 1) * settings.patch
        return replace(shape, patch=settings.patch, image=side)
    shape = folder_shape(Path(settings.folder), fresh=True)
    return resized(shape, replace(settings, pool=None)) if settings.fresh else shape


def export_model(
    model: nn.Module,
    shape: Shape | None,
    folder: Path,
    tokenizer_json: Path | None = None,
    dtype: torch.dtype = torch.float32,
    images: ImageEnds | None = None,
) -> None:
    """A model of `build_for` as a Hugging Face folder, see `export_folder`; adapters must have been merged."""
    if isinstance(model, ContrastiveModel) and shape is not None:
        _export_towers(model, shape, folder, tokenizer_json, dtype, images)
        return
    if isinstance(model, EncoderDecoder) and shape is not None:
        shape = replace(shape, depth=len(model.encoder.blocks), decoder_depth=len(model.decoder.blocks))
    if isinstance(model, MaskedAutoencoder) and shape is not None:
        sizes = {"hidden": _inside(model.blocks), "decoder_hidden": _inside(model.decoder.blocks)}
        shape = replace(shape, depth=len(model.blocks), decoder_depth=len(model.decoder.blocks), **sizes)
        export_folder(model, shape, folder, dtype=dtype, images=images)
        return
    if isinstance(model, Transformer | Encoder | EncoderDecoder | VisionTransformer) and shape is not None:
        if is_arranged(model):
            model, shape = evened(model, shape)
        else:  # what grows may be exported before it is as wide as its recipe says
            shape = replace(shape, hidden=_inside(find_blocks(model)[1]))
        export_folder(model, shape, folder, tokenizer_json, dtype, images)
        return
    from thrifty.models.huggingface import HuggingFaceModel, export_wrapped

    if not isinstance(model, HuggingFaceModel):
        raise Refused(f"a {type(model).__name__} has no Hugging Face format to be exported to")
    export_wrapped(model, folder, tokenizer_json, dtype)


def _inside(blocks: nn.ModuleList) -> int:
    """Inner width of the blocks' feed-forward networks."""
    return blocks[0].mlp.down.in_features  # type: ignore[union-attr,return-value]


def _export_towers(
    model: ContrastiveModel,
    shape: Shape,
    folder: Path,
    tokenizer_json: Path | None,
    dtype: torch.dtype,
    images: ImageEnds | None,
) -> None:
    if is_arranged(model):
        raise Refused("a model of two towers that has lost heads or neurons has no Hugging Face format")
    image, text = model.image.blocks, model.text.blocks
    sizes = {"depth": len(image), "hidden": image[0].mlp.down.in_features}
    sizes |= {"text_depth": len(text), "text_hidden": text[0].mlp.down.in_features}
    with torch.no_grad():  # where transformers has no limit
        model.logit_scale.clamp_(max=LARGEST_SCALE)
    export_folder(model, replace(shape, **sizes), folder, tokenizer_json, dtype, images)


def _build_other(settings: ModelSettings, ends: Ends, seed: int, task: Task) -> nn.Module:
    if not isinstance(ends, TextEnds):
        raise UsageError(
            f"the model in {settings.folder} is none of ours that read images",
            fix="give the folder of a ViTForImageClassification, without a teacher's token, or a preset: vit-nano",
        )
    from thrifty.models.huggingface import WRAPPERS, load_model

    given = _given_sizes(settings)
    if given:
        raise UsageError(
            f"model.{given[0]} is given for {settings.folder}, whose sizes only its own config.json can say",
            fix=f"leave model.{given[0]} out, or edit the folder's config.json",
        )
    if task not in WRAPPERS:
        raise UsageError(
            f"a language model such as the one in {settings.folder} cannot learn {task}",
            fix=f"set objective.name to {' or '.join(WRAPPERS)}",
        )
    vocabulary, length = ends.vocabulary, ends.length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_model(Path(settings.folder), task, settings.fresh, vocabulary, length)
    if not settings.fresh:
        limit = getattr(model.lm.config, "max_position_embeddings", None) or length
        _check_fit(settings.folder, model.vocabulary, limit, vocabulary, length)
    return model


def _refuse_another_kind(settings: ModelSettings, shape: Shape, task: Task) -> None:
    own = FAMILIES[shape.style].task
    if own != task:
        fitting = [name for name, preset in PRESETS.items() if FAMILIES[preset.style].task == task]
        instead = f", or take a model that can, such as model.preset = {fitting[0]}" if fitting else ""
        raise UsageError(
            f"the model {settings.folder or settings.preset} cannot learn {task}: {_SEES[own]}",
            fix=f"set objective.name = {own}{instead}",
        )


def _given_sizes(settings: ModelSettings) -> list[str]:
    names = (
        "depth", "width", "heads", "kv_heads", "hidden", "tied", "patch", "pool", "decoder_depth", "decoder_width",
        "text_depth", "text_width", "text_heads",
    )  # fmt: skip
    return [name for name in names if getattr(settings, name) is not None]


def _refuse_sizes_of_a_trained_model(settings: ModelSettings, but: str = "") -> None:
    given = [name for name in _given_sizes(settings) if name != but]
    if given and not settings.fresh:
        raise UsageError(
            f"model.{given[0]} is given, and the weights in {settings.folder} have their own",
            fix=f"leave model.{given[0]} out, or set model.fresh = true to start from random weights",
        )


def _seeing(folder: str, shape: Shape, images: ImageEnds) -> Shape:
    """The shape of a trained model once it is refitted to these images."""
    if shape.channels != images.channels:
        raise UsageError(
            f"the images have {images.channels} channels and the model in {folder} takes {shape.channels}",
            fix="set model.fresh = true to start from random weights, or choose another model",
        )
    labels = shape.vocabulary if shape.style == "clip" else len(images.labels) or shape.vocabulary
    return replace(shape, vocabulary=labels, image=images.side)


def _check_fit(folder: str, own_vocabulary: int, own_length: int, vocabulary: int, length: int) -> None:
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
