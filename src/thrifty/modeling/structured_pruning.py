"""Heads and neurons of any model: given a coefficient each, taken out for good, and put back as zeros.

A piece is a head (where heads share keys and values, all that share one) or a neuron of a feed-forward network. It is
some columns of the layer that writes into the stream, and the rows of the layers before it that lead to those columns
alone. What is added for a piece is zero when its coefficient is, so a model without it computes the same.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.modeling.residual_branches import ResidualBranch, find_branches, part_of_attention

Kind = Literal["heads", "neurons"]

GROUP = "heads_in_a_group"
"""Where an attention that pieces were taken out of says how many heads a piece has (`PrunableUnits.group`)."""
ZERO = -1
"""In an order of pieces: one of nothing but zeros."""

_HEAD_WIDTH = ("head_width", "head_dim", "attention_head_size")
_OF_HEADS = re.compile(r"heads$|head_size$|num_key_value_groups|embed_dim|hidden_size")
_INSTEAD = "take a Llama, GPT or BERT of ours, or a Llama-like model, BERT, DistilBERT or OPT of transformers"


@dataclass(frozen=True)
class UnitRows:
    """Where the pieces of a branch are in a layer before its last: `width` rows each, in turn, from `start` on."""

    layer: nn.Linear
    start: int
    width: int
    part: str = ""
    """What the layer calls these rows among its `parts`, if it has several."""


@dataclass(frozen=True)
class PrunableUnits:
    """The pieces of one branch, as they are now: whoever changes them finds them anew."""

    kind: Kind
    name: str
    """Of the writer, in the model."""
    writer: nn.Linear
    count: int
    width: int
    """Columns of the writer that a piece has."""
    rows: tuple[UnitRows, ...]
    owner: nn.Module
    sizes: Mapping[str, int]
    """Attributes of the owner that say how much there is, each with what one piece adds to it."""
    group: int = 0
    """Heads in a piece, with a key and a value of their own; 0 where all pieces share one."""


def find_units(model: nn.Module) -> dict[str, PrunableUnits]:
    """The pieces of every branch, by the name of the layer that writes into the stream.

    Raises RefusedError for a model of two stacks, whose blocks look at each other, and for one whose branches are put
    together in another way than is known here.
    """
    stacks = find_branches(model)
    if len(stacks) > 1:
        raise RefusedError(f"{' and '.join(stacks)} are two stacks, and one looks at the other", fix=_INSTEAD)
    branches = (branch for blocks in stacks.values() for block in blocks for branch in block)
    return {branch.name: _heads(branch) if branch.kind == "attention" else _neurons(branch) for branch in branches}


def _heads(branch: ResidualBranch) -> PrunableUnits:
    owner, writer = branch.owner, _linear(branch.name, branch.writer)
    width = next((value for name in _HEAD_WIDTH if isinstance(value := getattr(owner, name, None), int)), 0)
    parts = {rows.part: (rows, size) for name, layer in branch.inner.items() for rows, size in _parts(name, layer)}
    if not width or parts.keys() != {"q", "k", "v"}:
        raise RefusedError(f"the heads in front of {branch.name} cannot be told apart", fix=_INSTEAD)
    heads, shared = (parts[part][1] // width for part in "qk")
    # once pieces have been taken out, the numbers alone no longer tell which heads belong together
    group = getattr(owner, GROUP, 0 if heads > shared == 1 else heads // shared)
    per_piece = group or 1
    known = dict.fromkeys(("heads", "num_attention_heads", "num_heads", "n_heads"), per_piece)
    known |= {"all_head_size": per_piece * width}
    if getattr(owner, "embed_dim", None) == heads * width:  # what all heads give together, where it is asked for at all
        known |= {"embed_dim": per_piece * width}
    known |= dict.fromkeys(("kv_heads", "num_key_value_heads"), 1 if group else 0)
    known |= {"num_key_value_groups": 0 if group else 1}
    _refuse_unknown_sizes(branch, known)
    _refuse_parameters_of_pieces(branch, {heads * width, shared * width} - {width})
    widths = {"q": per_piece * width} | ({"k": width, "v": width} if group else {})
    rows = tuple(UnitRows(parts[part][0].layer, parts[part][0].start, each, part) for part, each in widths.items())
    sizes = {name: each for name, each in known.items() if isinstance(getattr(owner, name, None), int)}
    return PrunableUnits("heads", branch.name, writer, heads // per_piece, per_piece * width, rows, owner, sizes, group)


def _parts(name: str, layer: nn.Module) -> Iterator[tuple[UnitRows, int]]:
    """Queries, keys and values in a layer, each with how many rows it has."""
    layer = _linear(name, layer)
    if stated := getattr(layer, "parts", None):  # as our own models do
        start = 0
        for part, size in stated.items():
            yield UnitRows(layer, start, 0, part), size
            start += size
    elif (part := part_of_attention(name)[:1]) in ("q", "k", "v") and part_of_attention(name) not in ("qkv", "kv"):
        yield UnitRows(layer, 0, 0, part), layer.weight.shape[0]


def _neurons(branch: ResidualBranch) -> PrunableUnits:
    writer = _linear(branch.name, branch.writer)
    count = writer.weight.shape[1]
    rows: list[UnitRows] = []
    for name, layer in branch.inner.items():
        layer = _linear(name, layer)
        parts = getattr(layer, "parts", {"": layer.weight.shape[0]})
        if set(parts.values()) != {count}:
            raise RefusedError(f"{name} does not give one number for each that {branch.name} takes", fix=_INSTEAD)
        rows += [UnitRows(layer, index * count, 1, part) for index, part in enumerate(parts)]
    _refuse_parameters_of_pieces(branch, {count})
    sizes = {"intermediate_size": 1} if isinstance(getattr(branch.owner, "intermediate_size", None), int) else {}
    return PrunableUnits("neurons", branch.name, writer, count, 1, tuple(rows), branch.owner, sizes)


def _linear(name: str, layer: nn.Module) -> nn.Linear:
    if not isinstance(layer, nn.Linear):
        raise RefusedError(f"{name} is a {type(layer).__name__}, of which no piece can be taken out", fix=_INSTEAD)
    return layer


def _refuse_unknown_sizes(branch: ResidualBranch, known: Mapping[str, int]) -> None:
    for name, value in vars(branch.owner).items():
        if isinstance(value, int) and _OF_HEADS.search(name) and name not in {*known, *_HEAD_WIDTH}:
            raise RefusedError(f"{type(branch.owner).__name__} counts on {name} = {value}", fix=_INSTEAD)


def _refuse_parameters_of_pieces(branch: ResidualBranch, sizes: set[int]) -> None:
    """Norms of all heads at once, sinks and the like: they would have to shrink as well."""
    layers = {id(layer) for layer in (*branch.inner.values(), branch.writer)}
    for name, module in branch.owner.named_modules():
        own = () if id(module) in layers else module.named_parameters(recurse=False)
        for last, parameter in own:
            if parameter.ndim == 1 and len(parameter) in sizes and (name or parameter.numel() > 1):
                where = f"{name}.{last}" if name else last
                raise RefusedError(f"{where} before {branch.name} has a number for each piece", fix=_INSTEAD)


@torch.no_grad()
def prune_units(pieces: PrunableUnits, order: Sequence[int]) -> None:
    """Only the pieces of these numbers are left, in this order, each with its values; `ZERO` stands for one without
    effect. The stream, and the width of a head, stay as they are."""
    for layer in {id(rows.layer): rows.layer for rows in pieces.rows}.values():
        lines: list[int] = []
        at = 0
        for rows in sorted((rows for rows in pieces.rows if rows.layer is layer), key=lambda rows: rows.start):
            lines += range(at, rows.start)
            lines += _lines(order, rows.start, rows.width)
            at = rows.start + pieces.count * rows.width
            if rows.part and hasattr(layer, "parts"):
                layer.parts[rows.part] = len(order) * rows.width
        lines += range(at, layer.weight.shape[0])
        layer.weight = _taken(layer.weight, 0, lines)
        layer.out_features = len(lines)
        if layer.bias is not None:
            layer.bias = _taken(layer.bias, 0, lines)
    pieces.writer.weight = _taken(pieces.writer.weight, 1, _lines(order, 0, pieces.width))
    pieces.writer.in_features = len(order) * pieces.width
    if pieces.kind == "heads":
        setattr(pieces.owner, GROUP, pieces.group)
    for name, each in pieces.sizes.items():
        setattr(pieces.owner, name, getattr(pieces.owner, name) + each * (len(order) - pieces.count))


def _lines(order: Sequence[int], start: int, width: int) -> list[int]:
    return [ZERO if piece == ZERO else start + piece * width + i for piece in order for i in range(width)]


def _taken(parameter: nn.Parameter, dim: int, lines: Sequence[int]) -> nn.Parameter:
    """Lines of a parameter along a dim, a line of zeros for `ZERO`."""
    values = parameter.detach()
    if ZERO in lines:
        values = F.pad(values, (0, 0) * (values.ndim - 1 - dim) + (0, 1))  # what ZERO counts from the end
        lines = [values.shape[dim] - 1 if line == ZERO else line for line in lines]
    places = torch.tensor(lines, dtype=torch.int64, device=values.device)
    return nn.Parameter(values.index_select(dim, places), parameter.requires_grad)


def is_pruned(model: nn.Module) -> bool:
    """Whether pieces of a model were taken out or put in."""
    return any(GROUP in vars(module) for module in model.modules())


def pad_with_zeros(pieces: PrunableUnits, count: int) -> list[int]:
    """The order in which pieces are all there, and zeros behind them up to a count."""
    return [*range(pieces.count), *[ZERO] * (count - pieces.count)]


def add_coefficients(pieces: PrunableUnits) -> None:
    """A trained number for each piece that multiplies what it adds, 1 at first: `coefficients` of the writer."""
    writer = pieces.writer
    writer.coefficients = nn.Parameter(torch.ones_like(writer.weight[0, :: pieces.width]))
    writer.coefficients_hook = writer.register_forward_pre_hook(_times_coefficients)


def coefficients_of(model: nn.Module) -> dict[str, Tensor]:
    """The coefficients there are, by the name of the writer."""
    values = {name: vars(module).get("_parameters", {}).get("coefficients") for name, module in model.named_modules()}
    return {name: parameter for name, parameter in values.items() if parameter is not None}


@torch.no_grad()
def fold_coefficients(model: nn.Module) -> None:
    """Multiply all coefficients into the writers' weights, and take them off."""
    for name, coefficients in coefficients_of(model).items():
        writer = model.get_submodule(name)
        writer.weight.mul_(_per_column(coefficients, writer.weight.shape[1]).to(writer.weight.dtype))
        writer.coefficients_hook.remove()
        del writer.coefficients, writer.coefficients_hook


def _times_coefficients(writer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = args
    return (x * _per_column(writer.coefficients, x.shape[-1]).to(x.dtype), *rest)


def _per_column(coefficients: Tensor, columns: int) -> Tensor:
    """(n,) as (columns,), each number for as many columns."""
    return coefficients[:, None].expand(-1, columns // len(coefficients)).flatten()
