"""Structured pruning of heads and neurons in any model: coefficients, removal, and padding with zeros.

A unit is a head, or a neuron of a feed-forward network. Heads that share keys and values form one unit. A unit consists
of columns of the branch's output layer, and of the rows of earlier layers that feed only these columns. A unit with
coefficient zero adds nothing, so its removal does not change the model's output.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.modeling.attention_parts import part_of_layer
from thrifty.modeling.attention_trial import (
    attention_inputs,
    observed_heads,
    random_copy,
    with_real_tensors,
)
from thrifty.modeling.layer_shapes import in_width, is_transposed, out_width
from thrifty.modeling.module_surgery import weight_layers
from thrifty.modeling.residual_branches import ResidualBranch, find_branches

Kind = Literal["heads", "neurons"]
KINDS: tuple[Kind, ...] = ("heads", "neurons")
TRIED: ModuleNote[bool] = ModuleNote("tried_with_fewer_heads")
PRUNED: ModuleNote[Kind] = ModuleNote("pruned")
"""Note on an output layer before which units were removed or added."""

GROUP = "heads_in_a_group"
"""Attribute of a pruned attention module that stores the number of heads per unit (`PrunableUnits.group`)."""
OUT_WIDTHS, IN_WIDTHS = ("out_features", "nf"), ("in_features", "nx")
"""Attributes in which linear layers, and the Conv1D of GPT-2, keep their widths."""
ZERO = -1
"""Index of an added unit of zeros, in a list of unit indices."""

_HEAD_WIDTH = ("head_width", "head_dim", "attention_head_size", "head_size")
_HEADS = ("heads", "num_attention_heads", "num_heads", "n_heads", "n_head")
_ALL_HEADS = ("embed_dim", "attn_dim", "hidden_size", "all_head_size", "split_size")
"""Attributes that may store the total width of all heads. They may also store the width of the stream."""
_OF_HEADS = re.compile(r"heads$|head_size$|num_key_value_groups|embed_dim|hidden_size")
_INSTEAD = "use a model with separate or fused linear layers for queries, keys and values, such as Llama, BERT or NeoX"


@dataclass(frozen=True)
class UnitRows:
    """Rows of a branch's units (heads or neurons) in a layer before the output layer. Each unit has `width` consecutive
    rows, and the first unit starts at `start`."""

    layer: nn.Module
    start: int
    width: int
    part: str = ""
    """Name of the part in the layer's `parts`, if the layer is fused."""


@dataclass(frozen=True)
class PrunableUnits:
    """The prunable units of one branch: its heads or its neurons. Call `find_units` again after every change."""

    kind: Kind
    name: str
    """Name of the branch's output layer in the model."""
    writer: nn.Module
    count: int
    width: int
    """Number of columns of the output layer per unit."""
    rows: tuple[UnitRows, ...]
    owner: nn.Module
    sizes: Mapping[str, int]
    """Attributes of the branch's module that store sizes, mapped to the size per unit."""
    group: int = 0
    """Number of heads per unit if each unit has its own key and value; 0 if all units share one key and value."""

    @property
    def dim(self) -> int:
        """Dimension of the output layer's weight that its columns are: 1, or 0 for the Conv1D of GPT-2."""
        return 0 if is_transposed(self.writer) else 1


def find_units(model: nn.Module, kinds: Collection[Kind] = KINDS) -> dict[str, PrunableUnits]:
    """Return the units of `kinds` in every branch, by the name of the branch's output layer. Raise RefusedError for
    branches of an unsupported structure."""
    units: dict[str, PrunableUnits] = {}
    tried: set[type] = set()
    for branch in _all_branches(model):
        kind, find = ("neurons", _neurons) if branch.kind == "mlp" else ("heads", _heads)
        if kind in kinds:
            units[branch.name] = find(branch)
            if kind == "heads" and type(branch.owner) not in tried:
                _refuse_failing_trial(branch, units[branch.name])
                tried.add(type(branch.owner))
    _refuse_shared_biases(model, units.values())
    return units


def find_columns(model: nn.Module, neurons: bool) -> dict[str, PrunableUnits]:
    """Return the heads of each branch, and with `neurons` its neurons, as columns of the output layer, which suffices
    to set units to zero. Raise RefusedError for attention whose number of heads is unknown."""
    found = {}
    for branch in _all_branches(model):
        is_heads = branch.kind != "mlp"
        kind: Kind = "heads" if is_heads else "neurons"
        if not (is_heads or neurons):
            continue
        name = f"{branch.name}.out_proj" if isinstance(branch.writer, nn.MultiheadAttention) else branch.name
        writer, width = _linear(name, branch.last), _width(branch) if is_heads else 1
        if not width and (observed := observed_heads(branch.owner, _in_width(branch))):
            width = observed.width
        columns = in_width(writer)
        if not width or columns % width:
            raise RefusedError(f"the number of heads before {name} is unknown", fix=_INSTEAD)
        found[name] = PrunableUnits(kind, name, writer, columns // width, width, (), branch.owner, {})
    return found


def _all_branches(model: nn.Module) -> list[ResidualBranch]:
    return [branch for blocks in find_branches(model).values() for block in blocks for branch in block]


def _width(branch: ResidualBranch) -> int:
    """Return the number of columns of a head in the output layer of attention; 0 if it is unknown."""
    bundled = isinstance(branch.writer, nn.MultiheadAttention)
    owner, columns = branch.writer if bundled else branch.owner, in_width(branch.writer)
    stated = next((value for name in _HEAD_WIDTH if isinstance(value := getattr(owner, name, None), int)), 0)
    heads = next((value for name in _HEADS if isinstance(value := getattr(owner, name, None), int)), 0)
    return stated or (columns // heads if heads and columns % heads == 0 else 0)


def _heads(branch: ResidualBranch) -> PrunableUnits:
    owner, writer = branch.owner, _linear(branch.name, branch.writer)
    width = _width(branch)
    found = (each for name, layer in branch.inner.items() for each in _parts(name, layer, owner))
    parts = {rows.part: (rows, size) for rows, size in found}
    if width and len(parts) == 1:
        return _fused_heads(branch, writer, width, *next(iter(parts.items())))
    if not width or parts.keys() != {"q", "k", "v"}:
        raise RefusedError(f"the heads before {branch.name} cannot be separated", fix=_INSTEAD)
    heads, shared = (parts[part][1] // width for part in "qk")
    # after pruning, the counts alone no longer determine which heads share keys and values
    group = getattr(owner, GROUP, 0 if heads > shared == 1 else heads // shared)
    per_unit = group or 1
    known = _known_sizes(owner, heads, width, per_unit)
    known |= dict.fromkeys(("kv_heads", "num_key_value_heads"), 1 if group else 0)
    known |= {"num_key_value_groups": 0 if group else 1}
    _refuse_unknown_sizes(branch, known)
    _refuse_parameters_per_unit(branch, {heads * width, shared * width} - {width})
    _refuse_fixed_heads(branch, heads, [rows.layer for rows, _ in parts.values()])
    widths = {"q": per_unit * width} | ({"k": width, "v": width} if group else {})
    rows = tuple(UnitRows(parts[part][0].layer, parts[part][0].start, each, part) for part, each in widths.items())
    sizes = {name: each for name, each in known.items() if isinstance(getattr(owner, name, None), int)}
    return PrunableUnits("heads", branch.name, writer, heads // per_unit, per_unit * width, rows, owner, sizes, group)


def _fused_heads(
    branch: ResidualBranch, writer: nn.Module, width: int, part: str, found: tuple[UnitRows, int]
) -> PrunableUnits:
    """Return the heads of a layer that computes queries, keys and values of equal width: as three blocks of rows, or
    head by head."""
    (rows, size), columns = found, in_width(writer)
    if size != 3 * columns or columns % width:
        raise RefusedError(f"the heads before {branch.name} share keys and values in a fused layer", fix=_INSTEAD)
    known = _known_sizes(branch.owner, columns // width, width, 1)
    _refuse_unknown_sizes(branch, known)
    _refuse_parameters_per_unit(branch, {columns} - {width})
    _refuse_fixed_heads(branch, columns // width, [rows.layer])
    starts = (0,) if part == "query_key_value" else (0, columns, 2 * columns)
    each = 3 * width if part == "query_key_value" else width
    placed = tuple(UnitRows(rows.layer, start, each) for start in starts)
    sizes = {name: one for name, one in known.items() if isinstance(getattr(branch.owner, name, None), int)}
    return PrunableUnits("heads", branch.name, writer, columns // width, width, placed, branch.owner, sizes, 1)


def _known_sizes(owner: nn.Module, heads: int, width: int, per_unit: int) -> dict[str, int]:
    """Return attributes of an attention module that store numbers of heads or their total width, with the size per
    unit."""
    whole = {name: per_unit * width for name in _ALL_HEADS if getattr(owner, name, None) == heads * width}
    return dict.fromkeys(_HEADS, per_unit) | whole


def _parts(name: str, layer: nn.Module, owner: nn.Module) -> Iterator[tuple[UnitRows, int]]:
    """Yield the rows of queries, keys and values in a layer, each with the number of rows."""
    layer = _linear(name, layer)
    if stated := getattr(layer, "parts", None):  # an attribute of Thrifty's models
        start = 0
        for part, size in stated.items():
            yield UnitRows(layer, start, 0, part), size
            start += size
        return
    part = part_of_layer(name, layer, owner)
    if part in ("qkv", "query_key_value"):
        yield UnitRows(layer, 0, 0, part), out_width(layer)
    elif part != "kv" and part[:1] in ("q", "k", "v"):
        yield UnitRows(layer, 0, 0, part[:1]), out_width(layer)


def _neurons(branch: ResidualBranch) -> PrunableUnits:
    writer = _linear(branch.name, branch.writer)
    count = in_width(writer)
    rows: list[UnitRows] = []
    for name, layer in branch.inner.items():
        layer = _linear(name, layer)
        parts = getattr(layer, "parts", {"": out_width(layer)})
        if set(parts.values()) != {count}:
            raise RefusedError(f"the outputs of {name} do not match the inputs of {branch.name}", fix=_INSTEAD)
        rows += [UnitRows(layer, index * count, 1, part) for index, part in enumerate(parts)]
    _refuse_parameters_per_unit(branch, {count})
    sizes = {"intermediate_size": 1} if isinstance(getattr(branch.owner, "intermediate_size", None), int) else {}
    return PrunableUnits("neurons", branch.name, writer, count, 1, tuple(rows), branch.owner, sizes)


def _linear(name: str, layer: nn.Module) -> nn.Module:
    if not isinstance(layer, nn.Linear) and not is_transposed(layer):
        raise RefusedError(f"{name} is a {type(layer).__name__}, from which no unit can be removed", fix=_INSTEAD)
    return layer


def _refuse_unknown_sizes(branch: ResidualBranch, known: Mapping[str, int]) -> None:
    for name, value in vars(branch.owner).items():
        if isinstance(value, int) and _OF_HEADS.search(name) and name not in {*known, *_HEAD_WIDTH}:
            raise RefusedError(f"pruning cannot change {name} = {value} of {type(branch.owner).__name__}", fix=_INSTEAD)


def _refuse_fixed_heads(branch: ResidualBranch, heads: int, layers: Sequence[nn.Module]) -> None:
    """Raise RefusedError for attention whose number of heads is also stored outside the `layers` of queries, keys and
    values: in position biases, in projections of positions, or in biases that the model passes (ALiBi)."""
    owner, writer, is_tried_block = branch.owner, branch.writer, _is_tried_block(branch)
    placed = {id(layer) for layer in (*layers, writer)}
    for name, module in owner.named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            per_head = parameter.ndim > 1 and heads in parameter.shape and not isinstance(module, nn.Linear)
            projects = isinstance(module, nn.Linear) and module.out_features == in_width(writer) and not is_tried_block
            if id(module) not in placed and (per_head or projects):
                where = f"{name}.{last}" if name else last
                raise RefusedError(f"pruning refuses {where}, which has a part for each head", fix=_INSTEAD)
    if "alibi" in signature(owner.forward).parameters:
        raise RefusedError(f"pruning cannot change the position biases of {type(owner).__name__}", fix=_INSTEAD)


def _refuse_failing_trial(branch: ResidualBranch, units: PrunableUnits) -> None:
    """Raise RefusedError for attention that computes something else with fewer heads, since it also stores their number
    under another name. A copy of the module is called alone, if it can be called so, once."""
    if TRIED.get(branch.owner) or units.count < 2:
        return
    with with_real_tensors():
        smaller = random_copy(branch, (*branch.owner.modules(), branch.writer))
        before = attention_inputs(smaller.owner, _in_width(branch))
        if before is not None:
            prune_units(_heads(smaller), range(1, units.count))
            after = attention_inputs(smaller.owner, _in_width(branch))
            if after is None or not all(map(_are_close, after, _without_first(before, units.group))):
                raise RefusedError(
                    f"{type(branch.owner).__name__} computes other attention with fewer heads",
                    fix="reshape by the width of a head, such as .view(b, t, -1, head_dim), and store no other number",
                )
    TRIED.set(branch.owner, True)


def _without_first(inputs: Sequence[Tensor], group: int) -> list[Tensor]:
    """Return queries, keys and values (b, heads, t, k) without the first unit of `group` query heads. A module may
    repeat its keys for each query head, or share them among the heads of a unit, or among all heads."""
    heads, removed = inputs[0].shape[1], group or 1
    return [each[:, removed if each.shape[1] == heads else int(group > 0) :] for each in inputs]


def _are_close(one: Tensor, other: Tensor) -> bool:
    """Return True if tensors differ at most as with a low precision, which depends on the shapes of matrices."""
    return one.shape == other.shape and float((one - other).norm()) <= 0.2 * float(other.norm())


def _in_width(branch: ResidualBranch) -> int:
    return in_width(next(iter(branch.inner.values())))


def _is_tried_block(branch: ResidualBranch) -> bool:
    """Return True for a block that computes attention in its own code, if it can be called alone. It has norms of the
    stream and layers of other branches, which cannot be told from those of attention, so the trial decides."""
    layers = {id(layer) for layer in (*branch.inner.values(), branch.writer)}
    is_block = any(id(layer) not in layers for layer in weight_layers(branch.owner).values())
    return is_block and branch.kind != "mlp" and attention_inputs(branch.owner, _in_width(branch)) is not None


def _refuse_shared_biases(model: nn.Module, units: Iterable[PrunableUnits]) -> None:
    """Raise RefusedError for position biases of heads that the model computes once for several blocks."""
    heads = {each.count * (each.group or 1) for each in units if each.kind == "heads"}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.embedding_dim in heads:
            raise RefusedError(f"pruning refuses {name}.weight, which has a part for each head", fix=_INSTEAD)


def _refuse_parameters_per_unit(branch: ResidualBranch, sizes: set[int]) -> None:
    """Raise RefusedError for parameters with one element per unit, such as norms over all heads and attention sinks.
    Pruning does not support them."""
    if _is_tried_block(branch):
        return
    layers = {id(layer) for layer in (*branch.inner.values(), branch.writer)}
    for name, module in branch.owner.named_modules():
        own = () if id(module) in layers else module.named_parameters(recurse=False)
        for last, parameter in own:
            if parameter.ndim == 1 and len(parameter) in sizes and (name or parameter.numel() > 1):
                where = f"{name}.{last}" if name else last
                raise RefusedError(f"pruning refuses {where}, which has an element for each unit", fix=_INSTEAD)


@torch.no_grad()
def prune_units(units: PrunableUnits, order: Sequence[int]) -> None:
    """Keep only the units with the indices `order`, in this order; `ZERO` adds a unit of zeros. The stream's width and
    the head width do not change."""
    for layer in {id(rows.layer): rows.layer for rows in units.rows}.values():
        lines: list[int] = []
        at = 0
        for rows in sorted((rows for rows in units.rows if rows.layer is layer), key=lambda rows: rows.start):
            lines += range(at, rows.start)
            lines += _lines(order, rows.start, rows.width)
            at = rows.start + units.count * rows.width
            if rows.part and hasattr(layer, "parts"):
                layer.parts[rows.part] = len(order) * rows.width
        lines += range(at, out_width(layer))
        layer.weight = _selected(layer.weight, int(is_transposed(layer)), lines)
        _set_width(layer, OUT_WIDTHS, len(lines))
        if layer.bias is not None:
            layer.bias = _selected(layer.bias, 0, lines)
    units.writer.weight = _selected(units.writer.weight, units.dim, _lines(order, 0, units.width))
    _set_width(units.writer, IN_WIDTHS, len(order) * units.width)
    PRUNED.set(units.writer, units.kind)
    if units.kind == "heads":
        setattr(units.owner, GROUP, units.group)
    for name, each in units.sizes.items():
        setattr(units.owner, name, getattr(units.owner, name) + each * (len(order) - units.count))


def _set_width(layer: nn.Module, names: Sequence[str], width: int) -> None:
    for name in names:
        if hasattr(layer, name):
            setattr(layer, name, width)


def _lines(order: Sequence[int], start: int, width: int) -> list[int]:
    return [ZERO if unit == ZERO else start + unit * width + i for unit in order for i in range(width)]


def _selected(parameter: nn.Parameter, dim: int, lines: Sequence[int]) -> nn.Parameter:
    """Return the rows or columns `lines` of a parameter along `dim`, with zeros for `ZERO`."""
    values = parameter.detach()
    if ZERO in lines:
        values = F.pad(values, (0, 0) * (values.ndim - 1 - dim) + (0, 1))  # ZERO is the index of the last line
        lines = [values.shape[dim] - 1 if line == ZERO else line for line in lines]
    places = torch.tensor(lines, dtype=torch.int64, device=values.device)
    return nn.Parameter(values.index_select(dim, places), parameter.requires_grad)


def is_pruned(model: nn.Module, kinds: Collection[Kind] = KINDS) -> bool:
    """Return True if units of these kinds were removed or added."""
    return any(PRUNED.get(module) in kinds for module in model.modules())


def pad_with_zeros(units: PrunableUnits, count: int) -> list[int]:
    """Return the argument `order` of `prune_units` that keeps all units and appends zero units, up to `count` units."""
    return [*range(units.count), *[ZERO] * (count - units.count)]


def add_coefficients(units: PrunableUnits) -> None:
    """Add a trainable factor per unit, initially 1, as parameter `coefficients` of the output layer."""
    writer = units.writer
    writer.coefficients = nn.Parameter(torch.ones_like(writer.weight.select(1 - units.dim, 0)[:: units.width]))
    writer.coefficients_hook = writer.register_forward_pre_hook(_times_coefficients)


def coefficients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the coefficients of the units of each branch, by the name of the branch's output layer."""
    values = {name: vars(module).get("_parameters", {}).get("coefficients") for name, module in model.named_modules()}
    return {name: parameter for name, parameter in values.items() if parameter is not None}


@torch.no_grad()
def fold_coefficients(model: nn.Module) -> None:
    """Multiply all coefficients into the weights of the output layers, and remove the coefficients."""
    for name, coefficients in coefficients_of(model).items():
        writer = model.get_submodule(name)
        factors = _per_column(coefficients, in_width(writer)).to(writer.weight.dtype)
        writer.weight.mul_(factors[:, None] if is_transposed(writer) else factors)
        writer.coefficients_hook.remove()
        del writer.coefficients, writer.coefficients_hook


def _times_coefficients(writer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *rest = args
    return (x * _per_column(writer.coefficients, x.shape[-1]).to(x.dtype), *rest)


def _per_column(coefficients: Tensor, columns: int) -> Tensor:
    """Expand the coefficients of n units (n,) to one value per column (columns,)."""
    return coefficients[:, None].expand(-1, columns // len(coefficients)).flatten()
