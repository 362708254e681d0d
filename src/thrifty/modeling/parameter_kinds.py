"""Kinds of parameters for optimizers: weight decay, hidden matrices, fused layers.

Kinds are determined from names and shapes alone. Marks on a parameter store other facts: a learning rate factor, the
input dim, the membership in an embedding or output head, and rows that cannot be divided into fused layers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thrifty.core.shard_layout import order_of, tag_order

_TABLE = re.compile(
    r"(^|[._])(position|positions|wpe|embed_positions|pos_embed|cls_token|class_token|relative_attention_bias)([._]|$)"
    r"|(^|\.)(pos|pe|cls|pos_emb|pos_embedding|positional|positional_embedding|positional_encoding)$"
)
_END = re.compile(r"\w*embed\w*|wte|wpe|positions?|shared|\w*head|heads|\w*classifier|scores?|qa_outputs|proj_out")
_LAST = re.compile(r"((.*\.)?predictions\.)?decoder|fc|output")
_QUERY_KEY_VALUE = re.compile(r"w?qkv|qkv_proj|c_attn|in_proj_weight")
_KEY_VALUE = re.compile(r"w?kv|kv_proj")
_GATED = re.compile(r"up|gate_up|gate_up_proj|wi|w12|fc1|linear1")


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return True if weight decay and trust ratios apply to a parameter. Vectors and scalars (norms, biases, gains),
    parameters named bias, and position or class tokens are excluded."""
    return parameter.ndim > 1 and not name.endswith("bias") and not _TABLE.search(name)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix that maps activations to activations, or for a stack of such matrices (`mark_stack`).
    Embeddings and output heads (by name or `mark_end`), position tables and convolution kernels are excluded."""
    module = name.removesuffix(".weight")
    at_an_end = any(_END.fullmatch(word) for word in module.lower().split(".")) or _LAST.fullmatch(module)
    is_one = parameter.ndim == 2 or hasattr(parameter, "is_stack")
    return is_one and is_matrix(name, parameter) and not (at_an_end or is_marked_end(parameter))


def set_learning_rate_factor(parameter: Tensor, factor: float) -> None:
    """Set the factor that multiplies the learning rate of a parameter."""
    parameter.own_factor = factor  # type: ignore[attr-defined]


def learning_rate_factor(parameter: Tensor) -> float | None:
    """Return the factor of a parameter's learning rate; None if no factor was set."""
    return getattr(parameter, "own_factor", None)


def mark_end(parameter: Tensor) -> None:
    """Mark a parameter as part of an embedding or of an output layer."""
    parameter.is_model_end = True  # type: ignore[attr-defined]


def is_marked_end(parameter: Tensor) -> bool:
    """Return True if a parameter was marked by `mark_end`."""
    return getattr(parameter, "is_model_end", False)


def mark_stack(parameter: Tensor) -> None:
    """Mark a parameter (experts, …, …) as a stack of one matrix per expert."""
    parameter.is_stack = True  # type: ignore[attr-defined]


def mark_single(parameter: Tensor) -> None:
    """Mark a matrix as one layer, although its name is that of fused layers."""
    parameter.is_single_layer = True  # type: ignore[attr-defined]


def set_transposed(parameter: Tensor) -> None:
    """Mark a matrix as stored (in, out), unlike the weight of `nn.Linear`."""
    parameter.is_kept_transposed = True  # type: ignore[attr-defined]


def is_kept_transposed(parameter: Tensor) -> bool:
    """Return True if a matrix was marked by `set_transposed`."""
    return getattr(parameter, "is_kept_transposed", False)


def marks_of(parameter: Tensor) -> dict[str, Any]:
    """Return the marks of a parameter. A deep copy of a parameter loses its marks."""
    marks = ("own_factor", "is_kept_transposed", "is_model_end", "is_single_layer", "is_stack")
    return {name: getattr(parameter, name) for name in marks if hasattr(parameter, name)}


def stand_in_for(parameter: Tensor, copy: Tensor) -> Tensor:
    """Copy the marks of a parameter to `copy`, and return `copy`. An optimizer receives `copy` in place of the
    parameter."""
    vars(copy).update(marks_of(parameter))
    return tag_order(copy, order_of(parameter))


@dataclass(frozen=True)
class FusedSlices:
    """Layers fused in one parameter: the dim along which they are concatenated, and their sizes."""

    dim: int
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.split(list(self.sizes), self.dim)


def fused_slices(names: Sequence[str], parameters: Sequence[Tensor]) -> list[FusedSlices | None]:
    """Return the fused layers of each parameter; None for a single layer.

    Fused layers are queries, keys and values; keys and values; or the gate and value of a gated MLP. Keys and values
    have fewer rows if heads share them. The input width of the next layer in the same module determines the width of
    the queries. `query_key_value` interleaves heads, so it cannot be split and counts as a single layer, as does a
    parameter that `mark_single` marked.
    """
    layers = [_layer(name) for name in names]
    siblings: dict[str, dict[str, Tensor]] = {}
    for (owner, word), parameter in zip(layers, parameters, strict=True):
        if parameter.ndim == 2:
            siblings.setdefault(owner, {})[word] = parameter
    return [
        _slices(word, siblings[owner]) if parameter.ndim == 2 and not hasattr(parameter, "is_single_layer") else None
        for (owner, word), parameter in zip(layers, parameters, strict=True)
    ]


def _layer(name: str) -> tuple[str, str]:
    owner, _, word = name.removesuffix(".weight").rpartition(".")
    return owner, word


def _slices(word: str, siblings: Mapping[str, Tensor]) -> FusedSlices | None:
    rows, columns = siblings[word].shape
    # the following layer has this one's input width as its output width, and one slice's width as its input width
    widths = [matrix.shape[1] for other, matrix in siblings.items() if other != word and matrix.shape[0] == columns]
    kind = word.lower()
    if _QUERY_KEY_VALUE.fullmatch(kind):
        if kind == "c_attn" and columns in (2 * rows, 3 * rows):  # (in, out), as in the GPT-2 of transformers
            return FusedSlices(1, (rows,) * (columns // rows))
        queries = widths[-1] if widths else rows // 3
        shared, rest = divmod(rows - queries, 2)
        return FusedSlices(0, (queries, shared, shared)) if shared > 0 and not rest else None
    if rows % 2 == 0 and (_KEY_VALUE.fullmatch(kind) or (_GATED.fullmatch(kind) and rows // 2 in widths)):
        return FusedSlices(0, (rows // 2,) * 2)
    return None
