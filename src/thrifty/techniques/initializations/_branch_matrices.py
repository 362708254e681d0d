"""Matrices of a residual branch, including the parts of fused layers, and their Xavier initialization."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.modeling.attention_parts import part_of_layer
from thrifty.modeling.layer_shapes import in_width, is_transposed
from thrifty.modeling.module_surgery import find_stacks, is_under
from thrifty.modeling.residual_branches import ResidualBranch

Role = Literal["query", "key", "value", "hidden", "last"]
_ATTENTION: tuple[Role, ...] = ("query", "key", "value")
_ROLES: dict[str, Role] = {"q": "query", "k": "key", "v": "value"}
_UNSCALED_SCORES = {"GPTNeoSelfAttention": True, "EsmSelfAttention": False}
"""Attention classes without an attribute for the scale: True if scores are unscaled. ESM scales queries instead."""


@dataclass(frozen=True)
class BranchMatrix:
    """A matrix of a residual branch: a whole parameter, or a slice of a fused parameter."""

    parameter: str
    """Name of the parameter in the model."""
    role: Role
    values: Tensor
    """Writable view of the parameter, (out, in)."""
    fan_in: int
    fan_out: int
    folded: float = 1.0
    """Factor that the architecture requires in the initialization. T5 does not scale scores, but divides initial
    queries by sqrt(head width)."""


def matrices(branch: ResidualBranch) -> list[BranchMatrix]:
    """Return all matrices of a branch in order. Raise RefusedError if a fused layer cannot be split."""
    parts: list[BranchMatrix] = []
    for name, layer in branch.inner.items():
        if isinstance(layer, nn.MultiheadAttention):
            parts += _multihead_attention_matrices(name, layer)
        elif branch.kind == "mlp":
            parts += _mlp_matrices(branch, name, layer)
        else:
            parts += _attention_matrices(branch, name, layer)
    last = branch.name + (".out_proj" if branch.last is not branch.writer else "")
    return [*parts, _whole(last, branch.last, "last")]


def _rows(layer: nn.Module) -> Tensor:
    """Return the weight of a layer as (out, in)."""
    weight = layer.weight.detach()
    return weight.T if is_transposed(layer) else weight


def _whole(name: str, layer: nn.Module, role: Role) -> BranchMatrix:
    rows = _rows(layer)
    return BranchMatrix(f"{name}.weight", role, rows, rows.shape[1], rows.shape[0])


def _split(name: str, rows: Tensor, roles: Iterable[Role], sizes: list[int]) -> Iterator[BranchMatrix]:
    for role, part in zip(roles, rows.split(sizes), strict=True):
        yield BranchMatrix(name, role, part, part.shape[1], part.shape[0])


def _mlp_matrices(branch: ResidualBranch, name: str, layer: nn.Module) -> Iterator[BranchMatrix]:
    """Return the matrices of a layer of an MLP. If one layer computes gate and value, return both separately.

    Such a layer is twice as wide as the last layer's input.
    """
    whole = _whole(name, layer, "hidden")
    hidden = in_width(branch.last)
    fused = len(branch.inner) == 1 and whole.fan_out == 2 * hidden
    sizes = [hidden, hidden] if fused else [whole.fan_out]
    return _split(whole.parameter, whole.values, ["hidden"] * len(sizes), sizes)


def _attention_matrices(branch: ResidualBranch, name: str, layer: nn.Module) -> list[BranchMatrix]:
    rows = _rows(layer)
    if part_of_layer(name, layer, branch.owner) == "query_key_value":
        parts = _headwise_matrices(branch, name, rows)
    else:
        sizes = _sizes(branch, name, layer, len(rows))
        if sum(sizes.values()) != len(rows) or min(sizes.values(), default=0) < 1:
            raise _unknown_parts(name)
        parts = list(_split(f"{name}.weight", rows, sizes, [*sizes.values()]))
    folded = _head_width(branch, name) ** -0.5 if _has_unscaled_scores(branch.owner) else 1.0
    return [replace(each, folded=folded) if each.role == "query" else each for each in parts]


def _sizes(branch: ResidualBranch, name: str, layer: nn.Module, rows: int) -> dict[Role, int]:
    """Return the number of rows of queries, keys and values in a layer, in order; {} if unknown."""
    part, queries = part_of_layer(name, layer, branch.owner), in_width(branch.last)
    if stated := getattr(layer, "parts", None):  # as our own models do
        return {_ROLES[each[0]]: size for each, size in stated.items()}
    if part == "kv" or (part == "qkv" and len(branch.inner) > 1):
        sizes: dict[Role, int] = {"key": rows // 2, "value": rows // 2}
    elif part == "qkv":
        sizes = {"query": queries, "key": (rows - queries) // 2, "value": (rows - queries) // 2}
    else:
        return {_ROLES[part[0]]: rows} if part[:1] in _ROLES else {}
    inside = ".".join(word for word in name.split(".") if not word.isdigit())  # one note for all blocks
    add_note(f"{inside} is split into {', '.join(sizes)}, in this order")
    return sizes


def _has_unscaled_scores(attention: nn.Module) -> bool:
    """Return True if attention scores are not scaled, judged by the attributes of the attention module."""
    kind, core = type(attention).__name__, getattr(attention, "core", None)
    if kind in _UNSCALED_SCORES:
        return _UNSCALED_SCORES[kind]
    return 1.0 in (getattr(attention, "scaling", None), getattr(core, "keywords", {}).get("scale"))


def _headwise_matrices(branch: ResidualBranch, name: str, rows: Tensor) -> list[BranchMatrix]:
    """Return the matrices of a fused layer that stores query, key and value head by head, as in GPT-NeoX and BLOOM."""
    head = _head_width(branch, name)
    if rows.shape[0] != 3 * in_width(branch.last):
        raise _unknown_parts(name)
    parts = zip(_ATTENTION, rows.view(-1, 3, head, rows.shape[1]).unbind(1), strict=True)
    return [BranchMatrix(f"{name}.weight", role, part, rows.shape[1], rows.shape[0] // 3) for role, part in parts]


def _multihead_attention_matrices(name: str, attention: nn.MultiheadAttention) -> Iterator[BranchMatrix]:
    if attention.in_proj_weight is not None:
        fused = attention.in_proj_weight.detach()
        yield from _split(f"{name}.in_proj_weight", fused, _ATTENTION, [attention.embed_dim] * 3)
        return
    for letter, role in _ROLES.items():
        weight = getattr(attention, f"{letter}_proj_weight").detach()
        yield BranchMatrix(f"{name}.{letter}_proj_weight", role, weight, weight.shape[1], weight.shape[0])


def outer_matrices(model: nn.Module) -> list[BranchMatrix]:
    """Return the matrices outside the blocks: output heads, projections and patch embeddings, whose kernels are rows.

    Embedding tables and matrices tied to embeddings are excluded.
    """
    stacks = find_stacks(model)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    outer = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        inside = any(is_under(name, stack) for stack in stacks)
        if not inside and isinstance(weight, nn.Parameter) and weight.ndim > 1 and id(weight) not in tables:
            rows = weight.detach().T if is_transposed(module) else weight.detach().flatten(1)
            outer.append(BranchMatrix(f"{name}.weight", "hidden", rows, rows.shape[1], rows.shape[0]))
    return outer


def _head_width(branch: ResidualBranch, name: str) -> int:
    for attribute in ("head_width", "head_dim", "head_size", "key_value_proj_dim"):
        if isinstance(width := getattr(branch.owner, attribute, None), int):
            return width
    raise _unknown_parts(name)


def _unknown_parts(name: str) -> RefusedError:
    return RefusedError(
        f"the parts of {name!r} that compute queries, keys and values are unknown",
        fix="--with initializations.rezero; or use a model with separate layers for them",
    )


@torch.no_grad()
def draw_xavier(
    matrices: Iterable[BranchMatrix], seed: int, scale: float = 1.0, unscaled: Collection[Role] = ()
) -> None:
    """Initialize matrices by Glorot's uniform distribution, U(±sqrt(6 / (in + out))).

    Values are multiplied by `scale`, except for matrices with a role in `unscaled`. The values of a parameter depend
    only on the seed and the parameter's name.
    """
    generators: dict[str, torch.Generator] = {}
    for matrix in matrices:
        if matrix.parameter not in generators:
            generators[matrix.parameter] = keyed_generator(f"{seed}/{matrix.parameter}", matrix.values)
        factor = 1.0 if matrix.role in unscaled else scale
        bound = factor * matrix.folded * math.sqrt(6 / (matrix.fan_in + matrix.fan_out))
        matrix.values.uniform_(-bound, bound, generator=generators[matrix.parameter])
