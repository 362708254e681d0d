"""Widths of layers with a weight matrix, whatever its orientation."""

from torch import nn


def is_transposed(layer: nn.Module) -> bool:
    """Return True if a layer stores its weight as (in, out), as `Conv1D` of transformers does."""
    # the class of a sharded layer is derived from its original class
    return any(kind.__name__ == "Conv1D" for kind in type(layer).__mro__)


def in_width(layer: nn.Module) -> int:
    if isinstance(layer, nn.MultiheadAttention):
        return layer.embed_dim
    return layer.weight.shape[0 if is_transposed(layer) else 1]


def out_width(layer: nn.Module) -> int:
    if isinstance(layer, nn.MultiheadAttention):
        return layer.embed_dim
    return layer.weight.shape[1 if is_transposed(layer) else 0]
