"""The matrices of a residual branch one by one, also where a layer keeps several fused, and their first values."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.randomness import keyed_generator
from thrifty.core.run_notes import add_note
from thrifty.modeling.module_surgery import find_stacks, is_under
from thrifty.modeling.residual_branches import ResidualBranch, in_width, is_transposed, part_of_attention

Role = Literal["query", "key", "value", "hidden", "last"]
_ATTENTION: tuple[Role, ...] = ("query", "key", "value")
_ROLES: dict[str, Role] = {"q": "query", "k": "key", "v": "value"}
_MISLEADING = {"GPTNeoSelfAttention": True, "EsmSelfAttention": False}
"""Whether scores stay unscaled in attentions that do not say so: GPT-Neo's has no factor, ESM's divides queries."""


@dataclass(frozen=True)
class BranchMatrix:
    """One factor of a branch: a parameter, or a part of one where several are fused."""

    parameter: str
    """Its parameter's name in the model."""
    role: Role
    values: Tensor
    """A view of the parameter; writing to it writes there."""
    fan_in: int
    fan_out: int
    folded: float = 1.0
    """What the architecture expects to find in first values: T5 divides queries by the root of the head width there,
    and not in its attention."""


def matrices(branch: ResidualBranch) -> list[BranchMatrix]:
    """All factors of a branch, the last one at the end. Raises RefusedError where a fused layer cannot be taken
    apart."""
    parts: list[BranchMatrix] = []
    for name, layer in branch.inner.items():
        if isinstance(layer, nn.MultiheadAttention):
            parts += _of_multihead_attention(name, layer)
        elif branch.kind == "mlp":
            parts += _of_mlp(branch, name, layer)
        else:
            parts += _of_attention(branch, name, layer)
    last = branch.name + (".out_proj" if branch.last is not branch.writer else "")
    return [*parts, _whole(last, branch.last, "last")]


def _rows(layer: nn.Module) -> Tensor:
    """The weight of a layer as (out, in)."""
    weight = layer.weight.detach()
    return weight.T if is_transposed(layer) else weight


def _whole(name: str, layer: nn.Module, role: Role) -> BranchMatrix:
    rows = _rows(layer)
    return BranchMatrix(f"{name}.weight", role, rows, rows.shape[1], rows.shape[0])


def _split(name: str, rows: Tensor, roles: Iterable[Role], sizes: list[int]) -> Iterator[BranchMatrix]:
    for role, part in zip(roles, rows.split(sizes), strict=True):
        yield BranchMatrix(name, role, part, part.shape[1], part.shape[0])


def _of_mlp(branch: ResidualBranch, name: str, layer: nn.Module) -> Iterator[BranchMatrix]:
    """Gate and value may share a layer: then it gives twice what the last layer takes."""
    whole = _whole(name, layer, "hidden")
    hidden = in_width(branch.last)
    fused = len(branch.inner) == 1 and whole.fan_out == 2 * hidden
    sizes = [hidden, hidden] if fused else [whole.fan_out]
    return _split(whole.parameter, whole.values, ["hidden"] * len(sizes), sizes)


def _of_attention(branch: ResidualBranch, name: str, layer: nn.Module) -> list[BranchMatrix]:
    rows = _rows(layer)
    if part_of_attention(name) == "query_key_value":
        parts = _of_heads_in_turn(branch, name, rows)
    else:
        sizes = _sizes(branch, name, layer, len(rows))
        if sum(sizes.values()) != len(rows) or min(sizes.values(), default=0) < 1:
            raise _not_apart(name)
        parts = list(_split(f"{name}.weight", rows, sizes, [*sizes.values()]))
    folded = _head_width(branch, name) ** -0.5 if _leaves_scores_unscaled(branch.owner) else 1.0
    return [replace(each, folded=folded) if each.role == "query" else each for each in parts]


def _sizes(branch: ResidualBranch, name: str, layer: nn.Module, rows: int) -> dict[Role, int]:
    """How many rows of a layer make queries, keys and values, in their order; {} where it cannot be told."""
    part, queries = part_of_attention(name), in_width(branch.last)
    if stated := getattr(layer, "parts", None):  # as our own models do
        return {_ROLES[each[0]]: size for each, size in stated.items()}
    if part == "kv" or (part == "qkv" and len(branch.inner) > 1):
        sizes: dict[Role, int] = {"key": rows // 2, "value": rows // 2}
    elif part == "qkv":
        sizes = {"query": queries, "key": (rows - queries) // 2, "value": (rows - queries) // 2}
    else:
        return {_ROLES[part[0]]: rows} if part[:1] in _ROLES else {}
    inside = ".".join(word for word in name.split(".") if not word.isdigit())  # one note serves all blocks
    add_note(f"{inside} is taken as {', '.join(sizes)}, one after the other")
    return sizes


def _leaves_scores_unscaled(attention: nn.Module) -> bool:
    """Whether an attention says, in the ways of transformers or of our own models, that it multiplies scores by 1."""
    kind, core = type(attention).__name__, getattr(attention, "core", None)
    if kind in _MISLEADING:
        return _MISLEADING[kind]
    return 1.0 in (getattr(attention, "scaling", None), getattr(core, "keywords", {}).get("scale"))


def _of_heads_in_turn(branch: ResidualBranch, name: str, rows: Tensor) -> list[BranchMatrix]:
    """For each head its query, key and value, as GPT-NeoX and BLOOM keep them."""
    head = _head_width(branch, name)
    if rows.shape[0] != 3 * in_width(branch.last):
        raise _not_apart(name)
    parts = zip(_ATTENTION, rows.view(-1, 3, head, rows.shape[1]).unbind(1), strict=True)
    return [BranchMatrix(f"{name}.weight", role, part, rows.shape[1], rows.shape[0] // 3) for role, part in parts]


def _of_multihead_attention(name: str, attention: nn.MultiheadAttention) -> Iterator[BranchMatrix]:
    if attention.in_proj_weight is not None:
        fused = attention.in_proj_weight.detach()
        yield from _split(f"{name}.in_proj_weight", fused, _ATTENTION, [attention.embed_dim] * 3)
        return
    for letter, role in _ROLES.items():
        weight = getattr(attention, f"{letter}_proj_weight").detach()
        yield BranchMatrix(f"{name}.{letter}_proj_weight", role, weight, weight.shape[1], weight.shape[0])


def outer_matrices(model: nn.Module) -> list[BranchMatrix]:
    """Every layer's matrix outside the blocks: heads, projections, patch embeddings (a kernel is a row). Tables, and
    what is tied to one, are not."""
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
    raise _not_apart(name)


def _not_apart(name: str) -> RefusedError:
    return RefusedError(
        f"it cannot be told which part of {name} makes queries, keys or values",
        fix="use a model with separate layers for them, or an initialization that needs no such distinction",
    )


@torch.no_grad()
def draw_xavier(drawn: Iterable[BranchMatrix], seed: int, scale: float = 1.0, unscaled: Collection[Role] = ()) -> None:
    """Glorot's uniform values, U(±sqrt(6 / (in + out))), times `scale` but for some roles. What a parameter draws
    depends on (seed, its name) alone."""
    generators: dict[str, torch.Generator] = {}
    for matrix in drawn:
        if matrix.parameter not in generators:
            generators[matrix.parameter] = keyed_generator(f"{seed}/{matrix.parameter}", matrix.values)
        factor = 1.0 if matrix.role in unscaled else scale
        bound = factor * matrix.folded * math.sqrt(6 / (matrix.fan_in + matrix.fan_out))
        matrix.values.uniform_(-bound, bound, generator=generators[matrix.parameter])
