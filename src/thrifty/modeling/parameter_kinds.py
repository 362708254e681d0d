"""What optimizers must know of a parameter, told from names and shapes alone: whether it is decayed, whether it is a
hidden matrix, and whether it is several layers in one. And what only the model could tell: its own learning rate,
which side of it is the input's, and that it is an embedding or a head."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thrifty.core.shard_layout import order_of, tag_order

_TABLE = re.compile(
    r"(^|[._])(position|positions|wpe|embed_positions|pos_embed|cls_token|class_token|relative_attention_bias)([._]|$)"
)
_END = re.compile(r"\w*embed\w*|wte|wpe|positions?|shared|\w*head|heads|\w*classifier|scores?|qa_outputs|proj_out")
_LAST = re.compile(r"((.*\.)?predictions\.)?decoder|fc|output")
_QUERY_KEY_VALUE = re.compile(r"w?qkv|qkv_proj|c_attn|in_proj_weight")
_KEY_VALUE = re.compile(r"w?kv|kv_proj")
_GATED = re.compile(r"up|gate_up|gate_up_proj|wi|w12|fc1|linear1")


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether weight decay and trust ratios apply: not to vectors and scalars (norms, biases, gains), not to anything
    named a bias, not to position or class tokens. The one rule of the toolkit."""
    return parameter.ndim > 1 and not name.endswith("bias") and not _TABLE.search(name)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return True for a matrix that maps activations to activations: no embedding and no head, by name or by
    `mark_end`, nothing of a position, no convolution kernel."""
    module = name.removesuffix(".weight")
    at_an_end = any(_END.fullmatch(word) for word in module.lower().split(".")) or _LAST.fullmatch(module)
    return parameter.ndim == 2 and is_matrix(name, parameter) and not (at_an_end or is_marked_end(parameter))


def set_learning_rate_factor(parameter: Tensor, factor: float) -> None:
    """Let a parameter know by what its own learning rate is multiplied."""
    parameter.own_factor = factor  # type: ignore[attr-defined]


def learning_rate_factor(parameter: Tensor) -> float | None:
    """By what the learning rate of a parameter is multiplied, None where nobody has said."""
    return getattr(parameter, "own_factor", None)


def mark_end(parameter: Tensor) -> None:
    """Mark a parameter as one of the model's two ends: an embedding, or a layer that produces outputs."""
    parameter.is_model_end = True  # type: ignore[attr-defined]


def is_marked_end(parameter: Tensor) -> bool:
    """Return True if a parameter was marked by `mark_end`."""
    return getattr(parameter, "is_model_end", False)


def set_transposed(parameter: Tensor) -> None:
    """Mark a matrix as stored (in, out), unlike the weight of `nn.Linear`."""
    parameter.is_kept_transposed = True  # type: ignore[attr-defined]


def is_kept_transposed(parameter: Tensor) -> bool:
    """Return True if a matrix was marked by `set_transposed`."""
    return getattr(parameter, "is_kept_transposed", False)


def marks_of(parameter: Tensor) -> dict[str, Any]:
    """Return what a parameter was marked with, which a deep copy of it has lost."""
    marks = ("own_factor", "is_kept_transposed", "is_model_end")
    return {name: getattr(parameter, name) for name in marks if hasattr(parameter, name)}


def stand_in_for(parameter: Tensor, copy: Tensor) -> Tensor:
    """The same copy, which an optimizer is given in a parameter's place: it knows what the parameter knows."""
    vars(copy).update(marks_of(parameter))
    return tag_order(copy, order_of(parameter))


@dataclass(frozen=True)
class FusedSlices:
    """Layers one after the other in one parameter: along which dim, and how much of it each takes."""

    dim: int
    sizes: tuple[int, ...]

    def of(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.split(list(self.sizes), self.dim)


def fused_slices(names: Sequence[str], parameters: Sequence[Tensor]) -> list[FusedSlices | None]:
    """For each parameter the layers that it fuses, None where it is one layer: queries, keys and values (with fewer of
    the latter two where heads share them), keys and values, or the gate and the value of a gated network.

    The layer that reads their result, found beside them, tells how wide each is. `query_key_value`, whose heads take
    turns, cannot be cut into layers and counts as one.
    """
    layers = [_layer(name) for name in names]
    beside: dict[str, dict[str, Tensor]] = {}
    for (owner, word), parameter in zip(layers, parameters, strict=True):
        if parameter.ndim == 2:
            beside.setdefault(owner, {})[word] = parameter
    return [
        _slices(word, beside[owner]) if parameter.ndim == 2 else None
        for (owner, word), parameter in zip(layers, parameters, strict=True)
    ]


def _layer(name: str) -> tuple[str, str]:
    """The module that holds a layer, and the layer's own name."""
    owner, _, word = name.removesuffix(".weight").rpartition(".")
    return owner, word


def _slices(word: str, beside: Mapping[str, Tensor]) -> FusedSlices | None:
    rows, columns = beside[word].shape
    # the layer behind it gives as many numbers as this one takes, and takes what one slice gives
    widths = [matrix.shape[1] for other, matrix in beside.items() if other != word and matrix.shape[0] == columns]
    kind = word.lower()
    if _QUERY_KEY_VALUE.fullmatch(kind):
        if kind == "c_attn" and columns in (2 * rows, 3 * rows):  # (in, out), as transformers keeps GPT-2's
            return FusedSlices(1, (rows,) * (columns // rows))
        queries = widths[-1] if widths else rows // 3
        shared, rest = divmod(rows - queries, 2)
        return FusedSlices(0, (queries, shared, shared)) if shared > 0 and not rest else None
    if rows % 2 == 0 and (_KEY_VALUE.fullmatch(kind) or (_GATED.fullmatch(kind) and rows // 2 in widths)):
        return FusedSlices(0, (rows // 2,) * 2)
    return None
