"""Models in plain torch that know no technique, and the one place that decides which model a recipe means."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.errors import Refused, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.models.families import FAMILIES, assemble
from thrifty.models.interchange import export_folder, folder_shape, import_folder
from thrifty.models.presets import PRESETS, resized, shape_of
from thrifty.models.shape import Shape
from thrifty.models.transformer import Encoder, EncoderDecoder, Task, Transformer, initialize

_SEES = {
    "next_token": "no token sees later ones",
    "masked_token": "a token can see later ones",
    "sequence_to_sequence": "it reads a source and writes a target",
}
_KIND_FOR = {"answer": "next_token"}
"""Objectives that need the same kind of model as another one."""


def build_model(
    settings: ModelSettings, vocabulary: int, length: int, seed: int, task: Task | Literal["answer"] = "next_token"
) -> nn.Module:
    """The plain model of a run with its first values, the same at every call.

    A preset, or a folder: what a family of ours computes becomes one of our models, anything else a wrapper around the
    model of `transformers` that learns `task`. Raises UsageError for a model of another kind than the task needs, and
    where the data's vocabulary or length does not fit weights that exist.
    """
    task = _KIND_FOR.get(task, task)
    shape = model_shape(settings, vocabulary, length)
    if shape is not None:
        _refuse_another_kind(settings, shape, task)
    if shape is None or (settings.folder and not settings.fresh):
        # values from files are real even where everything else is being counted on fake tensors
        with unset_fake_temporarily():
            if shape is None:
                return _build_other(settings, vocabulary, length, seed, task)
            return import_folder(Path(settings.folder))[0]
    model = assemble(shape)
    initialize(model, seed)
    return model


def model_shape(settings: ModelSettings, vocabulary: int, length: int) -> Shape | None:
    """The shape of the run's model; None for an architecture that only `transformers` knows."""
    if not settings.folder:
        return shape_of(settings, vocabulary, length)
    _refuse_sizes_of_a_trained_model(settings)
    try:
        shape = folder_shape(Path(settings.folder), settings.fresh)
    except Refused:  # a variant our model does not compute, which transformers may
        return None
    if settings.fresh:
        return replace(resized(shape, settings), vocabulary=vocabulary, length=length)
    limit = shape.length if FAMILIES[shape.style].bounded else length
    _check_fit(settings.folder, shape.vocabulary, limit, vocabulary, length)
    return shape


def export_model(
    model: nn.Module,
    shape: Shape | None,
    folder: Path,
    tokenizer_json: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """A model of `build_model` as a Hugging Face folder, see `export_folder`; adapters must have been merged."""
    if isinstance(model, EncoderDecoder) and shape is not None:
        shape = replace(shape, depth=len(model.encoder.blocks), decoder_depth=len(model.decoder.blocks))
    if isinstance(model, Transformer | Encoder | EncoderDecoder) and shape is not None:
        export_folder(model, shape, folder, tokenizer_json, dtype)
        return
    from thrifty.models.huggingface import HuggingFaceModel, export_wrapped

    if not isinstance(model, HuggingFaceModel):
        raise Refused(f"a {type(model).__name__} has no Hugging Face format to be exported to")
    export_wrapped(model, folder, tokenizer_json, dtype)


def _build_other(settings: ModelSettings, vocabulary: int, length: int, seed: int, task: Task) -> nn.Module:
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
    names = ("depth", "width", "heads", "kv_heads", "hidden", "tied")
    return [name for name in names if getattr(settings, name) is not None]


def _refuse_sizes_of_a_trained_model(settings: ModelSettings) -> None:
    given = _given_sizes(settings)
    if given and not settings.fresh:
        raise UsageError(
            f"model.{given[0]} is given, and the weights in {settings.folder} have their own",
            fix=f"leave model.{given[0]} out, or set model.fresh = true to start from random weights",
        )


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
