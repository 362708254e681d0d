"""Weights of Hugging Face GPT-2 and Llama models, to our Transformer and back, without `transformers`.

One table says which of their tensors make up which of ours; import reads it one way, export the other. What differs
is the packing only: queries, keys and values are rows of one matrix here, as are gate and value; GPT-2 stores its
matrices transposed. No number is changed, so a round trip in the stored dtype is bit-exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thrifty.core.errors import IntegrityError, Refused
from thrifty.models.configuration import read_shape, write_config
from thrifty.models.folder import (
    StoredTensors,
    end_of_text,
    read_config,
    write_json,
    write_tokenizer,
    write_weights,
    written_aside,
)
from thrifty.models.presets import Shape, assemble
from thrifty.models.transformer import Transformer


@dataclass(frozen=True)
class Packing:
    """Our parameter is their tensors stacked along its rows (`rows` of each; none for a single tensor)."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False

    def pack(self, tensors: list[Tensor]) -> Tensor:
        parts = [tensor.T if self.transposed else tensor for tensor in tensors]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()

    def unpack(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = tensor.split(self.rows) if self.rows else [tensor]
        parts = [(part.T if self.transposed else part).contiguous() for part in parts]
        return dict(zip(self.theirs, parts, strict=True))


def _gpt_table(shape: Shape) -> Iterator[Packing]:
    yield Packing("embedding.token.weight", ("transformer.wte.weight",))
    yield Packing("embedding.position.weight", ("transformer.wpe.weight",))
    names = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for index in range(shape.depth):
        for ours, theirs in names.items():
            prefix = f"transformer.h.{index}.{theirs}"
            yield Packing(f"blocks.{index}.{ours}.weight", (f"{prefix}.weight",), transposed="norm" not in ours)
            yield Packing(f"blocks.{index}.{ours}.bias", (f"{prefix}.bias",))
    yield Packing("norm.weight", ("transformer.ln_f.weight",))
    yield Packing("norm.bias", ("transformer.ln_f.bias",))


def _llama_table(shape: Shape) -> Iterator[Packing]:
    yield Packing("embedding.token.weight", ("model.embed_tokens.weight",))
    heads = (shape.width, shape.kv_heads * shape.head_width, shape.kv_heads * shape.head_width)
    for index in range(shape.depth):
        ours, theirs = f"blocks.{index}", f"model.layers.{index}"
        qkv = tuple(f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
        gated = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        yield Packing(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
        yield Packing(f"{ours}.attention.qkv.weight", qkv, rows=heads)
        yield Packing(f"{ours}.attention.out.weight", (f"{theirs}.self_attn.o_proj.weight",))
        yield Packing(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        yield Packing(f"{ours}.mlp.up.weight", gated, rows=(shape.hidden, shape.hidden))
        yield Packing(f"{ours}.mlp.down.weight", (f"{theirs}.mlp.down_proj.weight",))
    yield Packing("norm.weight", ("model.norm.weight",))


_TABLES = {"gpt": _gpt_table, "llama": _llama_table}
_BODY = {"gpt": "transformer.", "llama": "model."}
_HEAD = "lm_head.weight"
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Masks and frequencies that older files carry along; they follow from the architecture."""


def _table(shape: Shape) -> list[Packing]:
    head = [] if shape.tied else [Packing("head.weight", (_HEAD,))]
    return [*_TABLES[shape.style](shape), *head]


def import_folder(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Shape]:
    """A GPT-2 or Llama folder as our model, its weights in `dtype`.

    Raises Refused for an architecture we do not compute, UsageError for a folder that is none or holds pickles,
    IntegrityError where weights are damaged, missing, left over or of another shape.
    """
    shape = read_shape(read_config(folder))
    with torch.device("meta"):
        model = assemble(shape)
    with StoredTensors(folder) as stored:
        values = _read_values(stored, shape, dtype)
    for name, parameter in model.named_parameters():
        if values[name].shape != parameter.shape:
            raise IntegrityError(
                f"{folder}: {name} would be {tuple(values[name].shape)} by its weights and "
                f"{tuple(parameter.shape)} by config.json"
            )
    model.load_state_dict(values, strict=False, assign=True)  # not strict: a tied head has no value of its own
    if shape.tied:
        model.head.weight = model.embedding.token.weight
    return model, shape


def _read_values(stored: StoredTensors, shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    table, body = _table(shape), _BODY[shape.style]
    bare = not any(name.startswith(body) for name in stored.names)  # GPT-2 as first published has no prefix

    def stored_name(name: str) -> str:
        return name.removeprefix(body) if bare else name

    wanted = {stored_name(name) for packing in table for name in packing.theirs}
    there = {name for name in stored.names if not name.endswith(_NOT_WEIGHTS)}
    if shape.tied and _HEAD in there:
        there.discard(_HEAD)
        if not torch.equal(stored[_HEAD], stored[stored_name(table[0].theirs[0])]):
            raise IntegrityError(
                f"{stored.folder}: config.json ties the head to the embedding, but {_HEAD} holds other values",
                fix="set tie_word_embeddings to false in config.json if the head is meant to be free",
            )
    if wanted != there:
        missing, extra = sorted(wanted - there), sorted(there - wanted)
        raise IntegrityError(
            f"{stored.folder}: the weights do not fit config.json: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} unexpected {extra[:3]}",
            fix="fetch weights and config.json of one and the same model",
        )
    return {
        packing.ours: packing.pack([stored[stored_name(name)].to(dtype) for name in packing.theirs])
        for packing in table
    }


def export_folder(
    model: Transformer,
    shape: Shape,
    folder: Path,
    tokenizer_json: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the model so that `transformers` loads it by its Auto classes, complete or not at all.

    Raises Refused when the model holds parameters the format has no place for, UsageError when the folder exists.
    """
    table = _table(shape)
    tensors = _written_tensors(model, table, dtype)
    end = None if tokenizer_json is None else end_of_text(tokenizer_json)
    special = {"bos_token_id": end, "eos_token_id": end}
    with written_aside(folder) as aside:
        write_weights(aside, tensors)
        write_json(aside / "config.json", write_config(shape) | special | {"dtype": str(dtype).removeprefix("torch.")})
        if end is not None:
            write_json(aside / "generation_config.json", special)
        if tokenizer_json is not None:
            write_tokenizer(aside, tokenizer_json, shape.length)


def _written_tensors(model: Transformer, table: list[Packing], dtype: torch.dtype) -> dict[str, Tensor]:
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    places = {packing.ours for packing in table}
    if values.keys() != places:
        extra, missing = sorted(values.keys() - places), sorted(places - values.keys())
        raise Refused(
            f"the model does not fit the format: no place for {extra[:3]} ({len(extra)} in all), "
            f"no values for {missing[:3]} ({len(missing)} in all)",
            fix="merge adapters and other additions into the weights first, and give the shape the model has now",
        )
    tensors = {}
    for packing in table:
        tensors |= packing.unpack(values[packing.ours].to("cpu", dtype))
    return tensors
