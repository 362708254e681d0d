"""Tensor parallelism of a model: split each layer by its plan, and refuse models that cannot be split."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import add_note
from thrifty.distributed.tensor_parallel_layers import TOKENS, WHOLE, TensorParallelizer
from thrifty.distributed.tensor_parallel_plan import Style, split_plan
from thrifty.distributed.tensor_parallel_rng import ParallelRandomRegion, drops
from thrifty.modeling.attention_cores import HEAD_WIDTHS
from thrifty.modeling.attention_parts import part_of_attention, part_of_layer
from thrifty.modeling.embeddings import find_head, token_tables
from thrifty.modeling.layer_shapes import in_width, is_transposed, out_width
from thrifty.modeling.module_surgery import find_stacks, is_under
from thrifty.modeling.parameter_kinds import fused_slices

HEAD_COUNTS = (
    "heads", "kv_heads", "n_head", "n_heads", "n_kv_heads", "num_heads", "num_kv_heads", "num_key_value_heads",
    "num_attention_heads", "all_head_size", "split_size",
)  # fmt: skip
"""Attributes of attention modules that store a number of heads or a width, which is divided by the number of ranks."""


@dataclass(frozen=True)
class LayerSplit:
    """A layer of the tensor-parallel plan and its slice sizes: outputs of a column layer, inputs of a row layer. `unit`
    divides all slice sizes."""

    name: str
    layer: nn.Module
    style: Style
    sizes: tuple[int, ...]
    unit: int

    @property
    def outputs_parts(self) -> bool:
        """True if a row layer receives the layer's outputs; False for an embedding of values per head."""
        return self.style == "column" and not isinstance(self.layer, nn.Embedding)

    def check(self, ranks: int) -> None:
        for size in self.sizes:
            if size % (ranks * self.unit):
                what = f"{size // self.unit} heads" if self.unit > 1 else f"{size} elements"
                best = math.gcd(ranks, *(each // self.unit for each in self.sizes))
                raise RefusedError(
                    f"{self.name!r}: {what} cannot be divided equally among {ranks} ranks",
                    fix=f"--mesh tensor={best}; or use a model with a multiple of {ranks}",
                )


def split_model(
    model: nn.Module, mesh: DeviceMesh, rules: Sequence[str] = (), along_tokens: bool = False
) -> TensorParallelizer:
    """Split a model in place over a mesh of one axis. `rules` are the rules of `split_plan`. If the model cannot be
    split, raise RefusedError before any change."""
    plan, stacks = split_plan(model, rules), find_stacks(model)
    blocks = {block for stack in stacks.values() for block in stack}
    owners: dict[str, list[LayerSplit]] = {}
    for split in _splits(model, plan):
        split.check(mesh.size())
        owners.setdefault(split.name.rpartition(".")[0], []).append(split)
    for name, own in owners.items():
        _refuse_unpaired(name, own)
        if model.get_submodule(name) not in blocks:
            _refuse_unplanned(model, name, plan)
    splitting = TensorParallelizer(mesh, TOKENS if along_tokens else WHOLE)
    for name, own in owners.items():
        owner = model.get_submodule(name)
        _split_owner(splitting, owner, own, in_stream=owner in blocks)
    for layer in _along_vocabulary(model, mesh.size()):
        splitting.vocabulary(layer)
    splitting.swap_parameters(model)
    for name, parameter in model.named_parameters():
        style = next((style for module, style in plan.items() if is_under(name, module)), None)
        uses_token_parts = along_tokens and style != "whole" and any(is_under(name, stack) for stack in stacks)
        if not isinstance(parameter, DTensor) and (style == "summed" or uses_token_parts):
            splitting.summed.add(name)
    if along_tokens:
        for stack in stacks.values():
            splitting.along_tokens(list(stack), draws=any(map(drops, stack)))
    between = ", and tokens between them" if along_tokens else ""
    add_note(f"{sum(map(len, owners.values()))} layers over {mesh.size()} ranks{between}")
    return splitting


def _splits(model: nn.Module, plan: Mapping[str, Style]) -> list[LayerSplit]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    cuts = dict(zip(parameters, fused_slices([*parameters], [*parameters.values()]), strict=True))
    splits = []
    for name, style in plan.items():
        layer = model.get_submodule(name)
        if style not in ("column", "row"):
            continue
        if getattr(getattr(layer, "weight", None), "ndim", 0) != 2 or "forward" in vars(layer):
            raise RefusedError(
                f"{name!r} is a {type(layer).__name__} that computes with more than its weight",
                fix="leave out the technique that changed it; or name other layers in plan",
            )
        cut = cuts[f"{name}.weight"]
        if style == "row":
            sizes: tuple[int, ...] = (in_width(layer),)
        elif isinstance(layer, nn.Embedding):
            sizes = (layer.embedding_dim,)
        elif stated := getattr(layer, "parts", None):
            sizes = tuple(stated.values())
        else:
            part = part_of_layer(name, layer, model.get_submodule(name.rpartition(".")[0]))
            if part == "other":
                raise RefusedError(
                    f"{name!r} stores queries, keys and values in an unknown order",
                    fix="store all queries, then all keys and all values; or leave the layer out of plan",
                )
            sizes = cut.sizes if cut and part != "query_key_value" else (out_width(layer),)
        splits.append(LayerSplit(name, layer, style, sizes, _unit(model, name, plan)))
    return splits


def _unit(model: nn.Module, name: str, plan: Mapping[str, Style]) -> int:
    """Return the divisor of each slice: the head width for a layer of attention, else 1."""
    owner, _, _ = name.rpartition(".")
    if not any(part_of_attention(other) for other in plan if other.rpartition(".")[0] == owner):
        return 1
    module = model.get_submodule(owner)
    for attribute in HEAD_WIDTHS:
        if isinstance(width := getattr(module, attribute, None), int):
            part = part_of_layer(name, model.get_submodule(name), module)
            return 3 * width if part == "query_key_value" else width
    raise RefusedError(f"the attention head width of {owner!r} is unknown", fix=f"set its attribute {HEAD_WIDTHS[0]}")


def _refuse_unplanned(model: nn.Module, owner: str, plan: Mapping[str, Style]) -> None:
    for path, _ in model.get_submodule(owner).named_parameters():
        name = f"{owner}.{path}"
        if not any(is_under(name, module) for module in plan):
            raise RefusedError(
                f"{name!r} is between split layers, and the plan has no style for it",
                fix=f'plan = ["{name.rpartition(".")[0]}=summed"] if it is applied to a rank\'s own part, or "=whole"',
            )


def _refuse_unpaired(owner: str, own: Sequence[LayerSplit]) -> None:
    columns = [split for split in own if split.outputs_parts]
    rows = [split for split in own if split.style == "row"]
    sizes = {size for split in columns for size in (split.sizes[0], split.sizes[0] // 3)}
    if any(row.sizes[0] not in sizes for row in rows) or (columns and not rows):
        raise RefusedError(
            f"{owner!r}: outputs of {', '.join(split.name for split in columns) or 'no column layer'} do not fit the "
            f"inputs of {', '.join(split.name for split in rows) or 'a row layer'}",
            fix="name in plan the layers that are split by column and by row",
        )
    for split in own:
        if split.style == "column" and set(dict(split.layer.named_parameters())) - {"weight", "bias"}:
            raise RefusedError(
                f"{split.name!r} has more than a weight and a bias", fix="leave out the technique that changed it"
            )


def _split_owner(splitting: TensorParallelizer, owner: nn.Module, own: Sequence[LayerSplit], in_stream: bool) -> None:
    """Split the layers of one module: column layers, and row layers that receive the column layers' outputs."""
    is_region = any(split.outputs_parts for split in own)
    draws_apart = is_region and splitting.stream is WHOLE and drops(owner)
    region = ParallelRandomRegion(splitting.mesh.get_local_rank()) if draws_apart else None
    if is_region and not in_stream:
        splitting.gather_input(owner)
    for split in own:
        if split.style == "row":
            splitting.row(split.layer, region)
        else:
            if in_stream:
                splitting.gather_input(split.layer)
            splitting.column(split.layer, split.sizes, region)
    if region is not None:
        splitting.end_region_after(owner, region)
    for attribute in HEAD_COUNTS if any(split.unit > 1 for split in own) else ():
        if isinstance(count := getattr(owner, attribute, None), int):
            splitting.count(owner, attribute, count)


def _along_vocabulary(model: nn.Module, ranks: int) -> list[nn.Module]:
    """Return the token embeddings and the output head that can be split. Layers that share a weight stay whole
    together; a note names each layer that stays whole and the reason.
    """
    head = find_head(model)
    ends: dict[str, nn.Module] = {**token_tables(model), **(dict([head]) if head else {})}
    reasons = {name: reason for name, layer in ends.items() if (reason := _reason_to_stay_whole(layer, ranks))}
    whole_weights = {id(ends[name].weight) for name in reasons}
    for name, reason in reasons.items():
        add_note(f"{name} stays whole: {reason}")
    return [layer for layer in ends.values() if id(layer.weight) not in whole_weights]


def _reason_to_stay_whole(layer: nn.Module, ranks: int) -> str:
    rows = layer.weight.shape[0]
    if "forward" in vars(layer) or set(dict(layer.named_parameters())) - {"weight", "bias"} or is_transposed(layer):
        return "it computes with more than its weight"
    if getattr(layer, "padding_idx", None) is not None or getattr(layer, "max_norm", None) is not None:
        return "its table treats some tokens differently"
    return "its vocabulary is too small" if -(-rows // ranks) * (ranks - 1) >= rows else ""
