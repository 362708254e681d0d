"""Padding of pruned models, whose blocks differ in size, to a shape that a published format can describe.

A config.json has one number of heads and one number of neurons for all blocks. Smaller blocks are therefore padded with
zero heads and zero neurons, which do not change the outputs. If the format derives the head width from the width of the
model, every block is padded to the original number of heads.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import add_note
from thrifty.modeling.structured_pruning import (
    Kind,
    PrunableUnits,
    find_units,
    is_pruned,
    pad_with_zeros,
    prune_units,
)
from thrifty.models.families import FAMILIES
from thrifty.models.families.model_family import Model
from thrifty.models.model_config import ModelConfig

FILLED_UP = "filled up with zeros"


def pad_pruned_model(model: Model, shape: ModelConfig) -> tuple[Model, ModelConfig]:
    """Return a copy of a model of Thrifty with equal blocks, and its shape. Add a note about the padding. `shape` is
    the shape before pruning."""
    model, family = deepcopy(model), FAMILIES[shape.style]
    if heads := _pruned(model, "heads"):
        together, count = heads[0].group or 1, max(each.count for each in heads)
        # transformers requires that the number of heads divides the width of the model, even if head_dim is set
        while shape.width % (count * together) or not (family.free_heads or count * together == shape.heads):
            count += 1
        _fill_up(heads, [count] * len(heads), family.free_heads)
        number = count * together
        width = shape.head_width if number * shape.head_width != shape.width else None
        kv_heads = count if heads[0].group else shape.kv_heads
        shape = replace(shape, heads=number, kv_heads=kv_heads, fixed_head_width=width)
    if neurons := _pruned(model, "neurons"):
        hidden = max(each.count for each in neurons) if family.free_hidden else shape.hidden
        _fill_up(neurons, [hidden] * len(neurons), family.free_hidden)
        shape = replace(shape, hidden=hidden)
    return model, shape


def pad_pruned_transformers(lm: nn.Module) -> nn.Module:
    """Return a copy of a model of transformers whose shapes its config describes. Sizes that a config can describe are
    found by trial: transformers builds models on the meta device. Raise RefusedError if there are none."""
    lm, whole, config = deepcopy(lm), _shapes(lm, {}), {}
    if heads := _pruned(lm, "heads"):
        together, width = heads[0].group or 1, heads[0].width // (heads[0].group or 1)
        count, most = max(each.count for each in heads), max(_count(each, whole) for each in heads)
        sizes: dict[str, int] = {}
        while count < most and not _describe(heads, count, _shapes(lm, sizes)):
            count += bool(sizes)
            sizes = _sizes(count * together, count if heads[0].group else 0, width)
        is_free = count < most
        _fill_up(
            heads,
            [count if is_free else _count(each, whole) for each in heads],
            is_free or "head_dim" in vars(lm.config),
        )
        config |= sizes if is_free else {}
    if neurons := _pruned(lm, "neurons"):
        count = max(each.count for each in neurons)
        words = [each for each in _HIDDEN if _describe(neurons, count, _shapes(lm, dict.fromkeys(each, count)))]
        _fill_up(neurons, [count if words else _count(each, whole) for each in neurons], bool(words))
        config |= dict.fromkeys(words[0], count) if words else {}
    for name, value in config.items():
        setattr(lm.config, name, value)
    if _shapes(lm, {}) != {name: value.shape for name, value in lm.named_parameters()}:
        raise RefusedError(
            f"no config of {type(lm).__name__} describes its pruned shapes",
            fix="use the trained model from Python: run.load_model(); or train without pruning to export it",
        )
    return lm


_HIDDEN = (
    ("intermediate_size",),
    ("ffn_dim",),
    ("hidden_dim",),
    ("n_inner",),
    ("d_ff",),
    ("encoder_ffn_dim", "decoder_ffn_dim"),
)
"""Keys for the number of neurons in configs of transformers."""


def _sizes(heads: int, kv_heads: int, width: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "head_dim": width} | ({"num_key_value_heads": kv_heads} if kv_heads else {})


def _shapes(lm: nn.Module, sizes: Mapping[str, int]) -> dict[str, torch.Size]:
    """Return the shape of each parameter for a config with `sizes`; {} if transformers rejects these sizes."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = type(lm.config).from_dict(lm.config.to_dict() | sizes)  # type: ignore[union-attr]
        with torch.device("meta"):
            built = type(lm)(config)  # type: ignore[call-arg]
    except (StrictDataclassError, ValueError):
        return {}
    return {name: parameter.shape for name, parameter in built.named_parameters()}


def _count(units: PrunableUnits, shapes: Mapping[str, torch.Size]) -> int:
    """Return the number of heads or neurons that the shape of an output layer implies."""
    return shapes[f"{units.name}.weight"][units.dim] // units.width


def _describe(units: list[PrunableUnits], count: int, shapes: Mapping[str, torch.Size]) -> bool:
    """Return True if shapes imply `count` heads or neurons in every block."""
    return bool(shapes) and all(_count(each, shapes) == count for each in units)


def _pruned(model: nn.Module, kind: Kind) -> list[PrunableUnits]:
    """Return the units of a kind in all blocks; [] if none was removed."""
    return [*find_units(model, {kind}).values()] if is_pruned(model, {kind}) else []


def _fill_up(units: list[PrunableUnits], counts: Sequence[int], is_free: bool) -> None:
    before, words = [each.count for each in units], units[0].kind
    if units[0].group > 1:
        words = f"groups of {units[0].group} heads"
    for each, count in zip(units, counts, strict=True):
        prune_units(each, pad_with_zeros(each, count))
    if before == [*counts]:
        return
    why = "the smallest number that the format allows" if is_free else "the format cannot describe fewer"
    add_note(f"{min(before)} to {max(before)} {words} a block are written as {max(counts)}, {FILLED_UP}: {why}")
