"""Residual branches of a block, and the matrices inside them, for any model.

A block adds the outputs of its branches to a residual stream of one width. Branches are found by structure and layer
names, not by a table of architectures. A branch ends in an output layer: its output width is the stream's width, and
its name is not typical of a query, key, value, gate or inner layer. Every other layer belongs to the output layer with
the longest common path. Among several such output layers, the next in order of definition is used. A block with a
weight outside all branches raises RefusedError. If only output layers matter, other weights than those of linear
layers, such as convolutions and the decay rates of a state space, may be in the module of a branch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from thrifty.core.errors import RefusedError
from thrifty.core.module_notes import ModuleNote
from thrifty.core.run_notes import add_note
from thrifty.modeling.attention_parts import part_of_layer
from thrifty.modeling.expert_stacks import is_expert_stack, last_parameters, stack_width
from thrifty.modeling.layer_shapes import in_width, out_width
from thrifty.modeling.module_surgery import change_first, find_stacks, refuse_repeated, weight_layers
from thrifty.modeling.parameter_kinds import is_matrix
from thrifty.modeling.stream_norms import is_norm

Kind = Literal["attention", "cross-attention", "mlp"]
Blocks = list[list["ResidualBranch"]]

_INNER = re.compile(r"up|gate|w1|w3|wi(_\d)?|fc1|lin1|linear1|c_fc|fc_in|dense_h_to_4h|(up|gate|gate_up)_proj")
_LAST = re.compile(r"o|out|down|proj|wo|w2|fc2|lin2|linear2|fc_out|(o|out|c|down)_proj|(out|o)_lin|dense_4h_to_h")
_CROSS = re.compile(r"cross|encoder_?att|enc_?dec|multihead_attn")
_NO_WEIGHT = re.compile(r"position|relative|rotary")
_NAME_THE_ENDS = (
    'name the layers that write into the residual stream, for instance where="(out|down)$"; blocks with weights '
    "outside linear layers are not supported"
)
_USE_KNOWN_BLOCKS = "use a model whose branches end in linear layers, such as --set model.preset=llama-nano"


@dataclass(frozen=True)
class ResidualBranch:
    """One residual branch of a block, with module names as in the model."""

    writer: nn.Module
    """Output layer of the branch: its output is added to the stream."""
    name: str
    """Name of the output layer."""
    inner: Mapping[str, nn.Module]
    """Weight layers before the output layer, in order of definition."""
    owner: nn.Module
    """Module that contains the inner layers."""
    kind: Kind

    @property
    def last(self) -> nn.Module:
        """Layer with the last weight matrix of the branch."""
        return self.writer.out_proj if isinstance(self.writer, nn.MultiheadAttention) else self.writer

    @property
    def last_parameters(self) -> dict[str, nn.Parameter]:
        """Weight and bias of the last layer, by their names inside the output layer; of all experts in an expert
        stack."""
        if is_expert_stack(self.writer):
            return last_parameters(self.writer)
        prefix = "" if self.last is self.writer else "out_proj."
        own = dict(self.last.named_parameters())  # may also have a gain
        return {f"{prefix}{name}": own[name] for name in ("weight", "bias") if name in own}

    @property
    def width(self) -> int:
        """Number of channels of the output."""
        return stack_width(self.writer) if is_expert_stack(self.writer) else out_width(self.last)

    @property
    def device(self) -> torch.device:
        return next(self.writer.parameters()).device


def find_branches(model: nn.Module, where: str | None = None, ends_only: bool = False) -> dict[str, Blocks]:
    """Return the branches of each block of each stack. `where` is a pattern of output layer names inside a block; with
    "" output layers are detected. Techniques without such a setting pass None. Raise RefusedError for a model without
    blocks, or for a weight of a block outside all branches. With `ends_only`, the inner layers of a branch need not
    include all of its weights, and the output layer may be an expert stack."""
    branches: dict[str, Blocks] = {}
    for stack, blocks in find_stacks(model).items():
        refuse_repeated(stack, blocks)
        prefix = f"{stack}." if stack else ""
        branches[stack] = [_branches(f"{prefix}{index}", block, where, ends_only) for index, block in enumerate(blocks)]
        kinds = " + ".join(branch.kind for branch in branches[stack][0])
        add_note(f"{len(blocks)} blocks of {kinds} in {stack or 'the model'}")
    return branches


def depths(model: nn.Module, stacks: Mapping[str, Blocks]) -> dict[str, int]:
    """Return the number of blocks that a forward pass runs in each stack of blocks. If blocks run repeatedly, as in
    ALBERT, the number exceeds the number of block modules."""
    config = getattr(model, "config", None)
    groups, layers = (getattr(config, name, None) for name in ("num_hidden_groups", "num_hidden_layers"))
    counts = {stack: layers if groups == len(blocks) else len(blocks) for stack, blocks in stacks.items()}
    for stack, blocks in stacks.items():
        if counts[stack] != len(blocks):
            add_note(f"the {len(blocks)} blocks of {stack} count as {counts[stack]}, since they run repeatedly")
    return counts


def is_decoder(blocks: Blocks) -> bool:
    """Return True if the blocks have cross-attention to the output of another stack."""
    return any(branch.kind == "cross-attention" for branch in blocks[0])


def _branches(name: str, block: nn.Module, where: str | None, ends_only: bool) -> list[ResidualBranch]:
    layers = _weight_layers(block, ends_only)
    parts = {path: part_of_layer(path, each, _owner(block, path)) for path, each in layers.items()}
    ends = _ends(layers, parts, where)
    inner: dict[str, dict[str, nn.Module]] = {end: {} for end in ends}
    for index, (path, layer) in enumerate(layers.items()):
        if isinstance(layer, nn.MultiheadAttention):
            inner[path] = {path: layer}
        elif path not in ends and (end := _end_of(path, ends, [*layers][index:])):
            inner[end][path] = layer
    branches: list[ResidualBranch] = []
    for end in ends:
        full = {f"{name}.{path}": layer for path, layer in inner[end].items()}
        owner = _owner(block, next(iter(inner[end]), end))
        of_attention = any(parts[path] or "att" in path.lower() for path in (end, *inner[end]))
        is_second = any(branch.kind == "attention" for branch in branches)
        kind: Kind = "attention" if of_attention else "mlp"
        kind = "cross-attention" if of_attention and is_second and _CROSS.search(end.lower()) else kind
        branches.append(ResidualBranch(layers[end], f"{name}.{end}", full, owner, kind))
    _refuse_leftovers(name, block, branches, ends_only, _USE_KNOWN_BLOCKS if where is None else _NAME_THE_ENDS)
    return branches


def _weight_layers(block: nn.Module, with_stacks: bool) -> dict[str, nn.Module]:
    """Return the weight layers of a block in order of definition, with its expert stacks if `with_stacks`."""
    layers = weight_layers(block)
    if with_stacks:
        places = {name: module for name, module in block.named_modules() if is_expert_stack(module) or name in layers}
        return {name: layers.get(name, module) for name, module in places.items()}
    return layers


def _end_of(path: str, ends: Sequence[str], later: Sequence[str]) -> str | None:
    """Return the name of the output layer of the branch that contains the layer `path`. Candidates are the output
    layers `ends` that share most modules with the layer. The first candidate in `later` is returned. Without one,
    return the last candidate if it shares more than the block, else None."""
    near = max((_shared(path, end) for end in ends), default=0)
    nearest = [end for end in ends if _shared(path, end) == near]
    return next((end for end in nearest if end in later), nearest[-1] if near else None)


def _ends(layers: Mapping[str, nn.Module], parts: Mapping[str, str], where: str | None) -> list[str]:
    """Return the names of the output layers of a block's branches, in order of definition. A layer with an unknown name
    is an output layer if it has the stream's width and is not directly after another output layer."""
    width = next((in_width(layer) for layer in layers.values() if not is_expert_stack(layer)), 0)
    ends: list[str] = []
    is_open = False
    for path, layer in layers.items():
        last = path.rpartition(".")[2]
        if where:
            is_end = re.search(where, path) is not None
        elif is_expert_stack(layer):
            is_end = stack_width(layer) == width
        else:
            inside = bool(parts[path]) or _INNER.fullmatch(last) is not None
            is_end = out_width(layer) == width and not inside and (is_open or _LAST.fullmatch(last) is not None)
        is_end = is_end or isinstance(layer, nn.MultiheadAttention)
        is_open = not is_end
        ends += [path] if is_end else []
    return ends


def _shared(path: str, other: str) -> int:
    """Return the number of modules, from the block inwards, that contain both layers."""
    words = zip(path.split(".")[:-1], other.split(".")[:-1], strict=False)
    return next(
        (i for i, (first, second) in enumerate(words) if first != second), min(path.count("."), other.count("."))
    )


def _owner(block: nn.Module, path: str) -> nn.Module:
    return block.get_submodule(path.rpartition(".")[0])


def _refuse_leftovers(name: str, block: nn.Module, branches: list[ResidualBranch], ends_only: bool, fix: str) -> None:
    stack = next((path for path, module in block.named_modules() if is_expert_stack(module)), "")
    if stack and not ends_only:
        raise RefusedError(
            f"{name}.{stack} has the matrices of all experts in one parameter, which this technique does not support",
            fix="leave out this technique; or use a model without experts",
        )
    ends: dict[str, str] = {}
    for branch in branches:
        if not (branch.inner or is_expert_stack(branch.writer)):
            raise RefusedError(f"{branch.name} has no inner layers", fix=fix)
        is_whole = isinstance(branch.writer, nn.MultiheadAttention)
        parent = branch.name if is_whole else branch.name.rpartition(".")[0]
        if branch.kind != "mlp" and ends.setdefault(parent, branch.name) != branch.name:
            raise RefusedError(f"{ends[parent]} and {branch.name} cannot both end the same attention", fix=fix)
    for path, child in block.named_children():
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        holds_norm = not is_norm(child) and any(map(is_norm, child.modules()))
        if holds_norm and not is_container and not weight_layers(child):
            raise RefusedError(
                f"{name}.{path} has a norm and no layer with weights: a branch without weights is not supported",
                fix="leave out this technique; or use a model whose branches end in linear layers",
            )
    layers = [layer for branch in branches for layer in (*branch.inner.values(), branch.writer)]
    placed = {id(parameter) for layer in layers for parameter in layer.parameters()}
    placed |= {id(module.weight) for module in block.modules() if isinstance(module, nn.Embedding)}
    if ends_only:
        places = [branch.name.removeprefix(f"{name}.") for branch in branches]
        placed |= {
            id(parameter)
            for path, parameter in block.named_parameters()
            if any(_is_inside(block, path, place) for place in places) and not _is_of_experts(block, path)
        }
    for path, parameter in block.named_parameters():
        if id(parameter) not in placed and is_matrix(path, parameter) and not _NO_WEIGHT.search(path.lower()):
            raise RefusedError(f"{name}.{path} belongs to no residual branch", fix=fix)
    if not branches:
        raise RefusedError(f"{name} has no layer that writes into a residual stream", fix=fix)


def _is_inside(block: nn.Module, path: str, end: str) -> bool:
    """Return True if a parameter and an output layer are in one module inside the block that is no container."""
    words = path.split(".")[: _shared(path, end)]
    owners = (block.get_submodule(".".join(words[: count + 1])) for count in range(len(words)))
    return any(not isinstance(owner, nn.ModuleList | nn.ModuleDict | nn.Sequential) for owner in owners)


def _is_of_experts(block: nn.Module, path: str) -> bool:
    """Return True for a parameter that may contain matrices, one for each expert."""
    return block.get_parameter(path).ndim > 2 and not isinstance(_owner(block, path), nn.Conv1d | nn.Conv2d)


def biases(layer: nn.Module) -> list[nn.Parameter]:
    """Return the bias vectors of a weight layer."""
    return [p for name, p in layer.named_parameters() if name.rpartition(".")[2] in ("bias", "in_proj_bias")]


GAIN_HOOK: ModuleNote[RemovableHandle] = ModuleNote("gain_hook")


def add_gain(writer: nn.Module, gain: nn.Parameter) -> None:
    """Multiply a module's output (the first element of a tuple) by a new parameter `gain` of the module."""
    writer.gain = gain
    GAIN_HOOK.set(writer, writer.register_forward_hook(_times_gain))


def _times_gain(module: nn.Module, args: Any, output: Any) -> Any:
    return change_first(output, lambda x: x * module.gain.to(x.dtype))
