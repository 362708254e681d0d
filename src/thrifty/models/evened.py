"""Models that have lost heads and neurons, block by block differently, in a shape that a published format can say.

A config.json has one number of heads and one of neurons for all blocks. So blocks that have fewer than the widest one
are filled up with heads and neurons of zeros, which change nothing of what is computed; and where the format takes the
width of a head from the width of the model, with as many heads as there were.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from thrifty.core.sparse.slimming import Pieces, arrange, filled_up, find_pieces
from thrifty.core.surgery import note
from thrifty.models.families import FAMILIES
from thrifty.models.families.family import Model
from thrifty.models.shape import Shape

FILLED_UP = "filled up with zeros"


def evened(model: Model, shape: Shape) -> tuple[Model, Shape]:
    """A copy of a model of ours, all of its blocks alike, and its shape; `shape` is that of the whole model. Says by
    `note` what was done."""
    model, family = deepcopy(model), FAMILIES[shape.style]
    heads, neurons = _by_kind(model)
    together, count = heads[0].group or 1, max(each.count for each in heads)
    # transformers takes only numbers of heads that divide the width of the model, even where they need not
    while shape.width % (count * together) or not (family.free_heads or count * together == shape.heads):
        count += 1
    hidden = max(each.count for each in neurons) if family.free_hidden else shape.hidden
    _fill_up(heads, count, family.free_heads)
    _fill_up(neurons, hidden, family.free_hidden)
    number = count * together
    width = shape.head_width if number * shape.head_width != shape.width else None
    kv_heads = count if heads[0].group else shape.kv_heads
    return model, replace(shape, heads=number, kv_heads=kv_heads, hidden=hidden, fixed_head_width=width)


def evened_wrapped(model: nn.Module) -> nn.Module:
    """A copy of a model around one of transformers, all of its blocks alike, its config saying the sizes."""
    model = deepcopy(model)
    config = model.lm.config
    heads, neurons = _by_kind(model)
    width, together = getattr(heads[0].owner, "head_dim", None), heads[0].group or 1
    count, whole = max(each.count for each in heads), config.num_attention_heads // together
    while not (width and _is_taken(config, count * together, count if heads[0].group else 0, width)) and count < whole:
        count += 1
    hidden = max(each.count for each in neurons)
    _fill_up(heads, count, bool(width))
    _fill_up(neurons, hidden, True)
    config.intermediate_size = hidden
    if width:
        for name, value in _sizes(count * together, count if heads[0].group else 0, width).items():
            setattr(config, name, value)
    return model


def _sizes(heads: int, kv_heads: int, width: int) -> dict[str, int]:
    return {"num_attention_heads": heads, "head_dim": width} | ({"num_key_value_heads": kv_heads} if kv_heads else {})


def _is_taken(config: Any, heads: int, kv_heads: int, width: int) -> bool:
    """Whether a config of this class may have so many heads: some must divide the width of the model."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        type(config).from_dict(config.to_dict() | _sizes(heads, kv_heads, width))
    except (StrictDataclassError, ValueError):
        return False
    return True


def _by_kind(model: nn.Module) -> tuple[list[Pieces], list[Pieces]]:
    found = list(find_pieces(model).values())
    return [each for each in found if each.kind == "heads"], [each for each in found if each.kind == "neurons"]


def _fill_up(pieces: list[Pieces], count: int, is_free: bool) -> None:
    counts, words = [each.count for each in pieces], pieces[0].kind
    if pieces[0].group > 1:
        words = f"groups of {pieces[0].group} heads"
    for each in pieces:
        arrange(each, filled_up(each, count))
    if min(counts) == count:
        return
    why = "the least that the format takes" if is_free else "the format has no word for fewer"
    note(f"{min(counts)} to {max(counts)} {words} a block are written as {count}, {FILLED_UP}: {why}")
