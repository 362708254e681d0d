"""Loading of any language model or image classifier of `transformers` from a local folder (extra `huggingface`).

Only architectures of `transformers` itself are supported. Code in the folder is never run, pickles are never opened,
and nothing is downloaded.
"""

from collections.abc import Mapping
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thrifty.core.errors import RefusedError, ThriftyError, UsageError, reason_of
from thrifty.core.model_spec import ImageModelSpec
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.modeling.adapter_base import ALSO_TRAINED
from thrifty.modeling.module_surgery import tied_names
from thrifty.modeling.structured_pruning import is_pruned
from thrifty.models.hf_folder import (
    generation_settings,
    quiet_transformers,
    read_config,
    read_json,
    special_ids,
    weight_files,
    write_json,
    write_tokenizer,
    written_aside,
)
from thrifty.models.hf_images import (
    HuggingFaceImageClassifier,
    refuse_other_size,
    resize_positions,
    settings_for,
)
from thrifty.models.hf_wrapper import (
    HuggingFaceCausalLM,
    HuggingFaceMaskedLM,
    HuggingFaceModel,
    HuggingFaceSeq2Seq,
    HuggingFaceTextClassifier,
    HuggingFaceTokenClassifier,
)
from thrifty.models.pad_pruned import pad_pruned_transformers
from thrifty.models.transformer import Task

WRAPPERS: dict[Task, type[HuggingFaceModel]] = {
    wrapper.task: wrapper
    for wrapper in (
        HuggingFaceCausalLM,
        HuggingFaceMaskedLM,
        HuggingFaceSeq2Seq,
        HuggingFaceTextClassifier,
        HuggingFaceTokenClassifier,
        HuggingFaceImageClassifier,
    )
}

CLASSIFIERS = ("text_classification", "token_classification", "image_classification")
"""Tasks that add a new head if the folder has no head for the number of labels."""

HEADS = {"classifier.", "head.", "score."}
"""Beginnings of the names of a head's parameters in a classifier of transformers whose body is not one module."""


def load_model(
    folder: Path | Mapping[str, Any],
    task: Task = "next_token",
    fresh: bool = False,
    vocabulary: int | None = None,
    length: int | None = None,
    values: bool = True,
    settings: Mapping[str, Any] | None = None,
    images: ImageModelSpec | None = None,
) -> HuggingFaceModel:
    """Return the model of a folder in float32 for `task`. With `fresh`, return the same architecture with random
    values.

    `fresh` uses torch's generator, and `folder` may then be a configuration. `vocabulary` and `length` (tokens of
    context) change a fresh architecture and are ignored otherwise. `settings` replace values of config.json. Without
    `values` the weights are random and no weights are read; this suffices to count parameters. The head of a classifier
    is random unless the folder has a head for the number of labels. A classifier of images is adapted to the labels and
    the size of `images`.

    Raise UsageError without `transformers`, or for a folder without config.json or safetensors. Raise RefusedError if
    `transformers` has no model of this architecture for the task, or if the attention mask contradicts the task.
    """
    refuse_without_transformers(f"a {WRAPPERS[task].words} of transformers")
    import transformers

    wrapper, content = WRAPPERS[task], read_config(folder) if isinstance(folder, Path) else dict(folder)
    if isinstance(folder, Path) and not fresh:
        weight_files(folder)
    kind = getattr(transformers, wrapper.auto)
    try:
        with quiet_transformers():
            config = transformers.CONFIG_MAPPING[content["model_type"]].from_dict(content)
            if fresh:
                _resize(config, vocabulary, length)
            adapted = settings_for(config, images, fresh) if images else {}
            for name, value in (adapted | dict(settings or {})).items():
                setattr(config, name, value)
            new: set[str] = set()
            if fresh or not values:
                lm = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
            else:
                lm, new = _with_weights(kind, folder, config, task in CLASSIFIERS, images)
    except Exception as error:  # the folder's settings may make code of transformers fail in any way
        if isinstance(error, ThriftyError) or is_out_of_memory(error):
            raise
        raise RefusedError(
            f"transformers cannot build a {wrapper.words} of type {content.get('model_type')!r}"
            f"{f' from {str(folder)!r}' if isinstance(folder, Path) else ''}: {reason_of(error)}",
            fix=f"pass a folder of an architecture that this version of transformers knows as a {wrapper.words}",
        ) from error
    model = wrapper(lm)
    ALSO_TRAINED.set(model, frozenset(f"lm.{name}" for name in new))
    return model


def refuse_without_transformers(what: str) -> None:
    """Raise UsageError if the package transformers is not installed."""
    if find_spec("transformers") is None:
        raise UsageError(
            f"{what} requires the package transformers, which is not installed",
            fix="pip install 'thrifty[huggingface]'",
        )


def load_causal_lm(
    folder: Path, fresh: bool = False, vocabulary: int | None = None, length: int | None = None
) -> HuggingFaceModel:
    """Return the causal language model of a folder, see `load_model`."""
    return load_model(folder, "next_token", fresh, vocabulary, length)


def _with_weights(
    kind: Any, folder: Any, config: Any, new_head: bool, images: ImageModelSpec | None
) -> tuple[nn.Module, set[str]]:
    """Return a model with the weights of a folder, and the names of the head's parameters. With `new_head` the folder
    may lack the head. Positions are interpolated for the size of `images`."""
    options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
    options["ignore_mismatched_sizes"] = new_head
    lm, report = kind.from_pretrained(folder, config=config, dtype=torch.float32, output_loading_info=True, **options)
    missing = {str(each[0] if isinstance(each, tuple) else each) for each in report["mismatched_keys"]}
    missing |= set(report["missing_keys"])
    head = _head_names(lm) if new_head else set()
    head |= {name for name in missing if new_head and "pooler" in name.split(".")}
    if images is not None:
        missing -= resize_positions(lm, folder, missing)
        refuse_other_size(folder, missing - head, images)
    if missing := missing - head:
        names = sorted(missing)
        raise RefusedError(
            f"{str(folder)!r} lacks the values of {len(names)} parameters of its architecture: {names[:3]}",
            fix="fetch the whole folder again; or set model.reinitialize = true to start from random values",
        )
    return lm, head


def _head_names(lm: Any) -> set[str]:
    """Return the names of the parameters outside the body that a classifier shares with other models."""
    is_inside = lm.base_model is not lm
    parts = {f"{lm.base_model_prefix}."} if is_inside else {f"{name}." for name, _ in lm.named_children()} - HEADS
    return {name for name, _ in lm.named_parameters() if not name.startswith(tuple(parts))}


def export_wrapped(
    model: HuggingFaceModel,
    folder: Path,
    tokenizer_json: Path | None = None,
    dtype: torch.dtype = torch.float32,
    processor: Mapping[str, Any] | None = None,
    keeps_generation: bool = False,
) -> None:
    """Write the model's folder with `save_pretrained`, and its tokenizer, or the settings of its image `processor`.
    `keeps_generation` is True if the generation settings of the model are for this tokenizer. After an error no folder
    remains."""
    lm = pad_pruned_transformers(model.lm) if is_pruned(model) else model.lm
    values = {
        name: value.to("cpu", dtype if value.is_floating_point() else value.dtype)
        for name, value in _untied(lm).items()
    }
    config = deepcopy(lm.config)
    config.architectures = [type(lm).__name__]  # a folder of another kind may have been loaded
    with written_aside(folder) as aside:
        with quiet_transformers():
            lm.save_pretrained(aside, state_dict=values)
        config.dtype = dtype
        if tokenizer_json is not None:
            # a classifier of texts may pool at a special token of its own configuration
            ids = {} if model.task in CLASSIFIERS else special_ids(tokenizer_json, model.task)
            ids.pop("pad_token_id", None)  # some architectures compute positions from it
            for name, number in ids.items():
                setattr(config, name, number)
            if (generation := aside / "generation_config.json").is_file():
                write_json(generation, generation_settings(read_json(generation) if keeps_generation else {}, ids))
            length, types = (getattr(config, name, None) for name in ("max_position_embeddings", "type_vocab_size"))
            write_tokenizer(aside, tokenizer_json, length or 1024, model.task, types or 0)
        if processor is not None:
            write_json(aside / "preprocessor_config.json", processor)
        config.save_pretrained(aside)


def _untied(lm: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with each tied tensor once. Otherwise converted copies of tied weights would be stored as
    separate tensors."""
    tied = tied_names(lm)
    return {name: value for name, value in lm.state_dict().items() if name not in tied}


_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")


def _resize(config: Any, vocabulary: int | None, length: int | None) -> None:
    if vocabulary is not None:
        config.vocab_size = vocabulary
        for name in _TOKENS:
            token = getattr(config, name, None)
            if isinstance(token, int) and token >= vocabulary:
                setattr(config, name, None)
    if length is not None and length > (getattr(config, "max_position_embeddings", None) or length):
        config.max_position_embeddings = length
