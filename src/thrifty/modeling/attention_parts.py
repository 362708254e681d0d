"""Which part of attention a layer computes, by its name, and where names do not say it, by a call of its module."""

import re

from torch import nn

from thrifty.core.module_notes import ModuleNote
from thrifty.core.run_notes import add_note
from thrifty.modeling.attention_calls import calls_attention
from thrifty.modeling.attention_trial import first_head_rows
from thrifty.modeling.layer_shapes import out_width
from thrifty.modeling.module_surgery import weight_layers
from thrifty.modeling.parameter_kinds import mark_single

_PART = r"q|k|v|qkv|kv|quer(?:y|ies)|keys?|values?|query_key_value"
_ATTENTION = re.compile(rf"(?:to_?|w_?|linear_)?({_PART})(?:_?(?:proj|lin|linear|layer|attn))?")
_OTHER_ATTENTION = re.compile(r"(c_attn)|(in_proj)|(?:q|k|v|kv)_[ab]_proj\w*|pos_(?:q|k|query|key)_proj")
FUSED = ("qkv", "query_key_value")
"""Layers that compute queries, keys and values: all queries first, or head by head, as in GPT-NeoX."""
PART: ModuleNote[str] = ModuleNote("part_of_attention")
"""Note on a layer: its part, as a call of its module showed. It is found once, because the module of a sharded layer
cannot be called alone."""
UNKNOWN = "unknown"


def part_of_attention(path: str) -> str:
    """Return, from a layer's name, the part of attention that the layer computes, such as "q" or "qkv". Return "other"
    for a factor of a low-rank projection or a projection of positions, and "" for a layer outside attention."""
    last = path.rpartition(".")[2].lower()
    if match := _ATTENTION.fullmatch(last):
        return match[1]
    match = _OTHER_ATTENTION.fullmatch(last)
    if not match or (match[2] and "att" not in path.lower()):
        return ""
    return "qkv" if match[1] or match[2] else "other"


def part_of_layer(name: str, layer: nn.Module, owner: nn.Module) -> str:
    """Return the part of attention that a layer of the module `owner` computes, as `part_of_attention` does.

    A call of the module decides on the order of rows of a fused layer, and on layers with other names in a module that
    calls attention. If the module cannot be called alone, the name decides. Rows in another order are "other".
    """
    named = part_of_attention(name)
    if hasattr(layer, "parts"):  # an attribute of Thrifty's models
        return named
    if named not in ("", *FUSED) or not (named or calls_attention(owner)):
        return named
    part = PART.get(layer) or PART.set(layer, _observed_part(layer, owner))
    return named if part == UNKNOWN else part


def mark_interleaved(model: nn.Module) -> None:
    """Mark layers named as fused queries, keys and values whose rows are in another order, such as head by head, as
    single layers."""
    for name, layer in weight_layers(model).items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if part_of_attention(name) == "qkv" and part_of_layer(name, layer, owner) != "qkv":
            mark_single(layer.weight)  # type: ignore[arg-type]
            add_note(f"the rows of {name} are not queries, then keys, then values, so it counts as one matrix")


def _observed_part(layer: nn.Module, owner: nn.Module) -> str:
    found = first_head_rows(layer, owner)
    if found is None or not (found.q or found.k or found.v):
        return UNKNOWN
    width, rows, queries = found.width, out_width(layer), found.heads * found.width
    # a module may repeat keys before its attention call, so their number is that of the rows
    keys = (rows - queries) // 2
    starts = {
        "qkv": (0, queries, queries + keys),
        "query_key_value": (0, width, 2 * width),
        "kv": (None, 0, rows // 2),
        "q": (0, None, None),
        "k": (None, 0, None),
        "v": (None, None, 0),
    }
    sizes = {"qkv": queries + 2 * keys, "query_key_value": 3 * queries, "q": queries}
    for part, firsts in starts.items():
        fits = all(_starts_at(each, first, width) for each, first in zip(found[:3], firsts, strict=True))
        if fits and rows == sizes.get(part, rows):
            return part
    return "other"


def _starts_at(rows: list[int], first: int | None, width: int) -> bool:
    """Return True if the first head comes from `width` rows from `first` on, or from none. A norm over all heads makes
    it depend on more rows."""
    return not rows if first is None else len(rows) > width or rows == [*range(first, first + width)]
