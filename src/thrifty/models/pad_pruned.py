"""Padding of pruned models, whose blocks differ in size, to a shape that a published format can describe.

A config.json has one number of heads and one number of neurons for all blocks. Smaller blocks are therefore padded with
zero heads and zero neurons, which do not change the outputs. If the format derives the head width from the width of the
model, every block is padded to the original number of heads.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from thrifty.core.run_notes import add_note
from thrifty.modeling.structured_pruning import PrunableUnits, find_units, pad_with_zeros, prune_units
from thrifty.models.families import FAMILIES
from thrifty.models.families.model_family import Model
from thrifty.models.model_config import ModelConfig

FILLED_UP = "filled up with zeros"


def pad_pruned_model(model: Model, shape: ModelConfig) -> tuple[Model, ModelConfig]:
    """Return a copy of a model of Thrifty with equal blocks, and its shape. Add a note about the padding. `shape` is
    the shape before pruning."""
    model, family = deepcopy(model), FAMILIES[shape.style]
    heads, neurons = _by_kind(model)
    together, count = heads[0].group or 1, max(each.count for each in heads)
    # transformers requires that the number of heads divides the width of the model, even if head_dim is set
    while shape.width % (count * together) or not (family.free_heads or count * together == shape.heads):
        count += 1
    hidden = max(each.count for each in neurons) if family.free_hidden else shape.hidden
    _fill_up(heads, count, family.free_heads)
    _fill_up(neurons, hidden, family.free_hidden)
    number = count * together
    width = shape.head_width if number * shape.head_width != shape.width else None
    kv_heads = count if heads[0].group else shape.kv_heads
    return model, replace(shape, heads=number, kv_heads=kv_heads, hidden=hidden, fixed_head_width=width)


def pad_pruned_wrapper(model: nn.Module) -> nn.Module:
    """Return a copy of a wrapped model of transformers. In the copy, all blocks have the same sizes, and the config has
    these sizes. Sizes that a config can describe are found by trial: transformers builds models on the meta device."""
    model = deepcopy(model)
    heads, neurons = _by_kind(model)
    together, whole = heads[0].group or 1, _columns(model, {})
    width = heads[0].width // together
    most, count = (_count(heads, whole, heads[0].width), max(each.count for each in heads))
    sizes = _sizes(count * together, count if heads[0].group else 0, width)
    while count < most and _count(heads, _columns(model, sizes), heads[0].width) != count:
        count += 1
        sizes = _sizes(count * together, count if heads[0].group else 0, width)
    hidden = max(each.count for each in neurons)
    words = [word for word in _HIDDEN if _count(neurons, _columns(model, {word: hidden}), 1) == hidden]
    hidden = hidden if words else _count(neurons, whole, 1)
    _fill_up(heads, count, count < most or hasattr(model.lm.config, "head_dim"))
    _fill_up(neurons, hidden, bool(words))
    for name, value in (dict.fromkeys(words[:1], hidden) | (sizes if count < most else {})).items():
        setattr(model.lm.config, name, value)
    return model


_HIDDEN = ("intermediate_size", "ffn_dim", "hidden_dim", "n_inner", "decoder_ffn_dim")
"""Keys for the number of neurons in configs of transformers."""


def _sizes(heads: int, kv_heads: int, width: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "head_dim": width} | ({"num_key_value_heads": kv_heads} if kv_heads else {})


def _columns(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of inputs of each layer for a config with `sizes`; {} if transformers rejects these sizes."""
    from huggingface_hub.errors import StrictDataclassError

    lm = model.lm
    try:
        config = type(lm.config).from_dict(lm.config.to_dict() | sizes)
        with torch.device("meta"):
            built = type(lm)(config)
    except (StrictDataclassError, ValueError):
        return {}
    return {f"lm.{name}": layer.in_features for name, layer in built.named_modules() if isinstance(layer, nn.Linear)}


def _count(units: list[PrunableUnits], columns: Mapping[str, int], width: int) -> int:
    """Return the number of heads or neurons per block that `columns` imply; 0 if the blocks differ."""
    counts = {columns.get(each.name, 0) for each in units}
    return counts.pop() // width if len(counts) == 1 else 0


def _by_kind(model: nn.Module) -> tuple[list[PrunableUnits], list[PrunableUnits]]:
    units = list(find_units(model).values())
    return [each for each in units if each.kind == "heads"], [each for each in units if each.kind == "neurons"]


def _fill_up(units: list[PrunableUnits], count: int, is_free: bool) -> None:
    counts, words = [each.count for each in units], units[0].kind
    if units[0].group > 1:
        words = f"groups of {units[0].group} heads"
    for each in units:
        prune_units(each, pad_with_zeros(each, count))
    if min(counts) == count:
        return
    why = "the smallest number that the format allows" if is_free else "the format cannot describe fewer"
    add_note(f"{min(counts)} to {max(counts)} {words} a block are written as {count}, {FILLED_UP}: {why}")
