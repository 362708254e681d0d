"""Models in plain torch that know no technique, and the one place that decides which model a recipe means."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.errors import Refused, UsageError
from thrifty.core.recipe import ModelSettings
from thrifty.models.configuration import read_shape
from thrifty.models.folder import read_config
from thrifty.models.interchange import export_folder, import_folder
from thrifty.models.presets import Shape, assemble, resized, shape_of
from thrifty.models.transformer import Transformer, initialize


def build_model(settings: ModelSettings, vocabulary: int, length: int, seed: int) -> nn.Module:
    """The plain model of a run with its first values, the same at every call.

    A preset, or a folder: GPT-2 and Llama become our `Transformer`, anything else a `HuggingFaceCausalLM`. Raises
    UsageError where the data's vocabulary or length does not fit weights that exist.
    """
    shape = model_shape(settings, vocabulary, length)
    if shape is None or (settings.folder and not settings.fresh):
        # values from files are real even where everything else is being counted on fake tensors
        with unset_fake_temporarily():
            if shape is None:
                return _build_other(settings, vocabulary, length, seed)
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
        shape = read_shape(read_config(Path(settings.folder)))
    except Refused:  # a variant our model does not compute, which transformers may
        return None
    if settings.fresh:
        return replace(resized(shape, settings), vocabulary=vocabulary, length=length)
    _check_fit(settings.folder, shape.vocabulary, shape.length, vocabulary, length)
    return shape


def export_model(
    model: nn.Module,
    shape: Shape | None,
    folder: Path,
    tokenizer_json: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """A model of `build_model` as a Hugging Face folder, see `export_folder`; adapters must have been merged."""
    if isinstance(model, Transformer) and shape is not None:
        export_folder(model, shape, folder, tokenizer_json, dtype)
        return
    from thrifty.models.huggingface import HuggingFaceCausalLM, export_causal_lm

    if not isinstance(model, HuggingFaceCausalLM):
        raise Refused(f"a {type(model).__name__} has no Hugging Face format to be exported to")
    export_causal_lm(model, folder, tokenizer_json, dtype)


def _build_other(settings: ModelSettings, vocabulary: int, length: int, seed: int) -> nn.Module:
    from thrifty.models.huggingface import load_causal_lm

    given = _given_sizes(settings)
    if given:
        raise UsageError(
            f"model.{given[0]} is given for {settings.folder}, whose sizes only its own config.json can say",
            fix=f"leave model.{given[0]} out, or edit the folder's config.json",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = load_causal_lm(Path(settings.folder), settings.fresh, vocabulary, length)
    if not settings.fresh:
        limit = getattr(model.lm.config, "max_position_embeddings", None) or length
        _check_fit(settings.folder, model.vocabulary, limit, vocabulary, length)
    return model


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
