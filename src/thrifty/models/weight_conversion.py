"""Conversion of weights between models of Hugging Face and models of Thrifty, without `transformers`.

A table per family maps tensors of transformers to tensors of Thrifty. Import and export use the table in opposite
directions. Only the packing of tensors differs. Thrifty fuses queries, keys and values into one matrix, and gate and
value into another. GPT-2 in transformers stores its matrices transposed. No value is changed, so a round trip in the
stored dtype is bit-exact.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.model_spec import ImageModelSpec
from thrifty.models.families import FAMILIES, assemble, tie
from thrifty.models.families.model_family import Model, ParameterPacking
from thrifty.models.hf_config import read_shape, write_config
from thrifty.models.hf_folder import (
    StoredTensors,
    generation_settings,
    read_config,
    special_ids,
    write_json,
    write_tokenizer,
    write_weights,
    written_aside,
)
from thrifty.models.model_config import ModelConfig

_OLDER = {".gamma": ".weight", ".beta": ".bias"}
"""Endings of norm parameter names in the first files of BERT, mapped to current endings."""


def packing_table(shape: ModelConfig) -> list[ParameterPacking]:
    family = FAMILIES[shape.style]
    head = [] if shape.tied or not family.head else [ParameterPacking("head.weight", (family.head,))]
    return [*family.table(shape), *head]


def folder_shape(folder: Path, fresh: bool = False) -> ModelConfig:
    """Return the shape in a folder's config.json. Weights are read only if the shape depends on them. Raise
    RefusedError for an unsupported architecture."""
    config = read_config(folder)
    shape = read_shape(config)
    if not shape.tied and config.get("tie_word_embeddings") and not fresh:
        with StoredTensors(folder) as stored:
            if FAMILIES[shape.style].head not in stored.names:
                raise RefusedError(
                    f"{str(folder)!r} ties its head without scaling it, which is not supported for T5",
                    fix="pass a T5 folder with an untied head; or with scale_decoder_outputs = true in config.json",
                )
    return shape


def import_folder(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Model, ModelConfig]:
    """Import the model of a folder of a supported family. Return Thrifty's model, with weights in `dtype`, and its
    shape. Raise RefusedError for an unsupported architecture. Raise UsageError for a folder without a model or with
    pickles. Raise IntegrityError if weights are damaged, missing, unexpected or of another shape."""
    shape = folder_shape(folder)
    with torch.device("meta"):
        model = assemble(shape)
    with StoredTensors(folder) as stored:
        values = _read_values(stored, shape, dtype)
    for name, tensor in _stored_tensors(model, values.keys()).items():
        if values[name].shape != tensor.shape:
            raise IntegrityError(
                f"{folder}: {name} has the shape {tuple(values[name].shape)} in the weights, but "
                f"{tuple(tensor.shape)} according to config.json",
                fix="fetch weights and config.json of the same model",
            )
    model.load_state_dict(values, strict=False, assign=True)  # not strict: a tied head is not stored
    tie(model, shape)
    return model, shape


def _read_values(stored: StoredTensors, shape: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    family, table = FAMILIES[shape.style], packing_table(shape)
    wanted = {name for packing in table for name in packing.theirs}
    names = {_today(name, family.renamed): name for name in stored.names if not re.search(family.left_out, name)}
    if not any(name.startswith(family.body) for name in names):  # an old file without the prefix
        names = {family.body + name if family.body + name in wanted else name: own for name, own in names.items()}
    _discard_repeats(stored, shape, names)
    if wanted != names.keys():
        missing, extra = sorted(wanted - names.keys()), sorted(names.keys() - wanted)
        raise IntegrityError(
            f"{stored.folder}: the weights do not fit config.json: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} unexpected {extra[:3]}",
            fix="fetch weights and config.json of the same model",
        )
    return {packing.ours: packing.pack([stored[names[name]].to(dtype) for name in packing.theirs]) for packing in table}


def _stored_tensors(model: nn.Module, places: Collection[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in places}


def _today(name: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    for old, new in _OLDER.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _discard_repeats(stored: StoredTensors, shape: ModelConfig, names: dict[str, str]) -> None:
    """Remove tensors from `names` that a file repeats. Raise IntegrityError if the copies differ."""
    family = FAMILIES[shape.style]
    aliases = dict(family.aliases) | ({family.head: family.token} if shape.tied else {})
    for alias, name in aliases.items():
        if alias not in names or name not in names:
            continue
        if not torch.equal(stored[names.pop(alias)], stored[names[name]]):
            raise IntegrityError(
                f"{stored.folder}: config.json ties the head to the embedding, but {alias} and {name} differ",
                fix="set tie_word_embeddings to false in config.json if the head is meant to be free",
            )


def export_folder(
    model: Model,
    shape: ModelConfig,
    folder: Path,
    tokenizer_json: Path | None = None,
    dtype: torch.dtype = torch.float32,
    images: ImageModelSpec | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a model in the format that the Auto classes of `transformers` load. After an error no folder remains. With
    `images`, label names and settings of the image processor are included. `generation` has the generation settings of
    the base model. Raise RefusedError for parameters that the format cannot store. Raise UsageError if the folder
    exists."""
    table = packing_table(shape)
    tensors = _written_tensors(model, table, dtype)
    config = write_config(shape)
    task = FAMILIES[shape.style].task
    if task not in ("classification", "masked_reconstruction"):
        config = FAMILIES[shape.style].with_special(config, special_ids(tokenizer_json, task))
    if images is not None and images.labels:
        config |= label_names(images)
    with written_aside(folder) as aside:
        write_weights(aside, tensors)
        write_json(aside / "config.json", config | {"dtype": str(dtype).removeprefix("torch.")})
        if task in ("next_token", "sequence_to_sequence") and config["eos_token_id"] is not None:
            ids = special_ids(tokenizer_json, task)
            write_json(aside / "generation_config.json", generation_settings(ids | dict(generation or {}), ids))
        if tokenizer_json is not None:
            write_tokenizer(aside, tokenizer_json, shape.length, task, config.get("type_vocab_size", 0))
        if images is not None:
            write_json(aside / "preprocessor_config.json", image_processor(images))


def label_names(images: ImageModelSpec) -> dict[str, Any]:
    """Return the labels in the format of config.json."""
    return {
        "id2label": {str(number): name for number, name in enumerate(images.labels)},
        "label2id": {name: number for number, name in enumerate(images.labels)},
    }


def image_processor(images: ImageModelSpec) -> dict[str, Any]:
    """Return preprocessor_config.json: size, central crop and normalization of pixels 0 … 255, as in training.

    The image processor of CLIP is written, because the image processor of ViT does not crop."""
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": images.channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": images.side},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": images.side, "width": images.side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
    }


def _written_tensors(model: Model, table: list[ParameterPacking], dtype: torch.dtype) -> dict[str, Tensor]:
    places = {packing.ours for packing in table}
    values = {name: tensor.detach() for name, tensor in _stored_tensors(model, places).items()}
    if values.keys() != places:
        extra, missing = sorted(values.keys() - places), sorted(places - values.keys())
        raise RefusedError(
            f"the model does not fit the format: extra {extra[:3]} ({len(extra)} in all), "
            f"missing {missing[:3]} ({len(missing)} in all)",
            fix="merge adapters and other additions into the weights first, and pass the current shape of the model",
        )
    tensors = {}
    for packing in table:
        tensors |= packing.unpack(values[packing.ours].to("cpu", dtype))
    return tensors
