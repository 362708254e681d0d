"""Module surgery: find and change modules of any model without knowledge of its architecture.

Changes never rename a parameter. Additions are new parameters or buffers of a module. A changed computation wraps the
module's forward in place. So a weight has the same name in every checkpoint, with and without techniques.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getmro, signature
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from thrifty.core.errors import RefusedError, class_name
from thrifty.core.run_notes import add_note
from thrifty.modeling.expert_stacks import is_expert_stack
from thrifty.modeling.layer_shapes import in_width, out_width
from thrifty.modeling.stage_placeholders import present


@dataclass(frozen=True)
class ModuleSelection:
    """Modules that a filter matched, and modules that it skipped, by name. Skipped modules have a reason."""

    matched: Mapping[str, nn.Module]
    skipped: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        total = len(self.matched) + len(self.skipped)
        skipped = "; ".join(f"skipped {name}: {reason}" for name, reason in self.skipped.items())
        return f"{len(self.matched)} of {total} modules" + (f"; {skipped}" if skipped else "")


def select(
    model: nn.Module,
    kind: type | tuple[type, ...],
    where: str = "",
    skip: Callable[[str, nn.Module], str | None] = lambda name, module: None,
) -> ModuleSelection:
    """Return modules of `kind` whose name contains a match of the pattern `where`. `skip` returns a reason to skip a
    module. Modules with a computed weight are skipped. Raise RefusedError with the available names if nothing
    matches."""
    candidates = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    computed = "its weight is computed from other parameters"
    reasons = {
        name: computed if computes_weight(module) else skip(name, module)
        for name, module in candidates.items()
        if re.search(where, name)
    }
    matched = {name: candidates[name] for name, reason in reasons.items() if not reason}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    if not matched:
        available = ", ".join(sorted({re.sub(r"\d+", "N", name) for name in candidates}))
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        what = f"no module matches {where!r}" if where else "no module is left to change"
        fix = f"match one of: {available}" if available else "use another model: this model has none of that kind"
        raise RefusedError(what + (f" ({why})" if why else ""), fix=fix)
    selection = ModuleSelection(matched, skipped)
    add_note(str(selection))
    return selection


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and list of the repeated residual blocks: the longest ModuleList of blocks. Blocks of other
    pipeline stages are left out. Raise RefusedError if the model has no list of blocks."""
    lists = {name: _local_blocks(module) for name, module in model.named_modules() if _is_list_of_equals(module)}
    if not lists:
        raise RefusedError(
            f"no list of equal blocks was found in {class_name(model)}",
            fix="keep the repeated blocks of the model in one nn.ModuleList or nn.Sequential",
        )
    name = max(lists, key=lambda key: (len(lists[key]), sum(p.numel() for p in lists[key].parameters())))
    return name, lists[name]


def find_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Return every outermost list of equal blocks, by name, in order of definition.

    A decoder has one stack, an encoder-decoder has two, and a pyramid has one per stage. The blocks of a hybrid have
    different kinds, such as attention and state spaces, but one residual stream. Lists inside a block and lists
    of single layers, towers or output heads are no stacks. Blocks of other pipeline stages are left out. In a model
    without ModuleLists of blocks, an `nn.Sequential` of several equal blocks is a stack. Raise RefusedError if the
    model has no stack.
    """
    lists = _stacks(model, nn.ModuleList)
    if blocks := _without_heads(lists):
        return blocks
    sequences = _stacks(model, nn.Sequential, outside=lists)
    return _without_heads(sequences) or lists or sequences or dict([find_blocks(model)])


def _stacks(model: nn.Module, kind: type[nn.Module], outside: Iterable[str] = ()) -> dict[str, nn.ModuleList]:
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        if not any(is_under(name, stack) for stack in (*outside, *stacks)) and _is_list_of_equals(module, kind):
            first = present(module)[0]
            if len(_matrix_layers(first)) > 1 and not _is_tower(first):
                stacks[name] = _local_blocks(module)
    return stacks


def _without_heads(stacks: Mapping[str, nn.ModuleList]) -> dict[str, nn.ModuleList]:
    longest = max(map(len, stacks.values()), default=0)
    return {
        name: blocks
        for name, blocks in stacks.items()
        if returns_stream_width(blocks[0]) or (len(blocks) == longest and _passes_stream(blocks[0]))
    }


def _passes_stream(block: nn.Module) -> bool:
    """Return True if attention, or a layer whose input has another width, returns the width of a norm and of an earlier
    layer's input. Later layers of the block, such as a gate, may have other outputs."""
    layers, norms = [*weight_layers(block).values()], _norm_widths(block)
    streams = [{*map(in_width, layers[: n + 1])} & {*norms} for n in range(len(layers))]
    return any(
        out_width(layer) in widths and (isinstance(layer, nn.MultiheadAttention) or in_width(layer) != out_width(layer))
        for layer, widths in zip(layers, streams, strict=True)
    )


def returns_stream_width(block: nn.Module) -> bool:
    """Return True if the last layer's output has the input width of a layer in the block, or the block has expert
    stacks. This holds for blocks, but not for output heads."""
    layers = [*weight_layers(block).values()]
    is_block = bool(layers) and out_width(layers[-1]) in map(in_width, layers)
    return is_block or any(map(is_expert_stack, block.modules()))


def are_copies(blocks: Iterable[nn.Module]) -> bool:
    """Return True if each block can be a copy of another block. The first block may have further parameters."""
    shapes = [{(name, p.shape) for name, p in block.named_parameters()} for block in blocks]
    return len({*map(frozenset, shapes[1:])}) < 2 and all(each <= shapes[0] for each in shapes)


def _is_tower(module: nn.Module) -> bool:
    """Return True if a module is no block, but contains a list of several equal blocks, and at most one of its weight
    layers is outside of the list. A block with a list of experts or MLPs has more layers or attention outside."""
    lists = [
        name
        for name, each in module.named_modules()
        if isinstance(each, nn.ModuleList | nn.Sequential)
        and len(each) > 1
        and all(map(_is_block, present(each)))
        and are_copies(present(each))
    ]
    layers = _matrix_layers(module).items()
    outside = [layer for name, layer in layers if not any(is_under(name, each) for each in lists)]
    return bool(lists) and len(outside) < 2 and not any(isinstance(layer, nn.MultiheadAttention) for layer in outside)


def refuse_repeated(stack: str, blocks: nn.ModuleList) -> None:
    """Raise RefusedError if a stack contains one block in several places."""
    if len({*blocks}) < len(blocks):
        raise RefusedError(
            f"{stack or 'the model'} contains one block in several places, so a change of this block would act in each",
            fix="build a separate block for each place; to share weights, use --with memory.share_parameters",
        )


def is_under(name: str, module: str) -> bool:
    """Return True if `name` is inside the module named `module`; "" is the model itself."""
    return not module or name.startswith(f"{module}.")


def _is_list_of_equals(module: nn.Module, kind: type[nn.Module] = nn.ModuleList) -> TypeGuard[nn.ModuleList]:
    if not isinstance(module, kind) or (kind is nn.Sequential and len(module) == 1):  # type: ignore[arg-type]
        return False  # a sequence of one is a wrapper of a model, not a list of blocks
    children = present(module)
    have_equal_widths = len({frozenset(_norm_widths(child)) for child in children}) == 1
    return (have_equal_widths and len({*map(type, children)}) == 1) or _are_mixed(children)


def _are_mixed(blocks: Sequence[nn.Module]) -> bool:
    """Return True if blocks of different kinds continue one residual stream, such as the attention and state-space
    blocks of a hybrid. Stages of a pyramid, such as Swin's, and towers are not blocks, but contain lists of blocks."""
    if not all(_is_block(block) and not _contains_blocks(block) for block in blocks):
        return False
    calls = {tuple(signature(type(block).forward).parameters) for block in blocks}
    bases = set.intersection(*({*getmro(type(block))} - {*getmro(nn.Module)} for block in blocks)) if blocks else set()
    streams = [_norm_widths(block) for block in blocks]
    usual = [{width for width, count in each.items() if count == max(each.values())} for each in streams]
    widths = set.intersection(*usual) if usual else set()
    return any(all(_returns_width(block, width) for block in blocks) for width in widths) and bool(
        bases or len(calls) == 1
    )


def _returns_width(block: nn.Module, width: int) -> bool:
    """Return True if a block's last layer has outputs of this width, and a layer has inputs of it. A classifier or a
    layer between the stages of a pyramid has other outputs."""
    layers = [*weight_layers(block).values()]
    return bool(layers) and out_width(layers[-1]) == width and width in map(in_width, layers)


def _is_block(module: nn.Module) -> bool:
    return len(_matrix_layers(module)) > 1 and bool(_norm_widths(module))


def _contains_blocks(module: nn.Module) -> bool:
    lists = (each for each in module.modules() if isinstance(each, nn.ModuleList | nn.Sequential) and len(each))
    return any(all(map(_is_block, each)) for each in lists)


def _norm_widths(block: nn.Module) -> Counter[int]:
    """Return how often each width of a norm occurs in a block."""
    named = (module for module in block.modules() if "norm" in type(module).__name__.lower())
    scales = (getattr(module, "weight", None) for module in named)
    return Counter(scale.numel() for scale in scales if isinstance(scale, Tensor) and scale.ndim == 1)


def _local_blocks(blocks: nn.ModuleList) -> nn.ModuleList:
    """Return the list itself if this rank has all its blocks, so that it can be changed. Otherwise return a new list of
    the blocks on this rank."""
    own = present(blocks)
    return blocks if len(own) == len(blocks) else nn.ModuleList(own)


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return modules with their own weight matrix, by name, in order of definition. These are linear layers of any
    class. `nn.MultiheadAttention` counts as one module, because it does not call its own layers."""
    return {name: layer for name, layer in _matrix_layers(module).items() if not computes_weight(layer)}


def _matrix_layers(module: nn.Module) -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if _multiplies(child) and not any(is_under(name, whole) for whole in layers):
            layers[name] = child
    return layers


def _multiplies(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    if is_parametrized(module, "weight"):  # reading it may write buffers, as spectral_norm does
        return isinstance(module, nn.Linear)
    is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
    is_leaf = not any(True for _ in module.children())
    return is_leaf and not is_table and getattr(getattr(module, "weight", None), "ndim", 0) == 2


def computes_weight(module: nn.Module) -> bool:
    """Return True if a module computes its weight from other parameters, as `weight_norm` does. Values written to a
    computed weight would be lost."""
    return is_parametrized(module, "weight") or isinstance(vars(module).get("weight"), Tensor)


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Replace a module's forward by `wrapper(module, inner, *args, **kwargs)`, where `inner` is the previous
    forward. In a copy of the module, `inner` is the copy's forward."""
    present = module.forward
    is_own = getattr(present, "__self__", None) is module

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # a new method at each call would trigger a recompilation
        inner = MethodType(present.__func__, self) if is_own and self is not module else present
        return wrapper(self, inner, *args, **kwargs)

    replace_forward(module, MethodType(forward, module))


def refuse_copies(model: nn.Module, who: str, in_evaluation: bool = False) -> None:
    """Make copies of the model raise an error in training, because a copy lacks the setup. With `in_evaluation` copies
    also raise an error if gradients are recorded in evaluation mode."""
    own = weakref.ref(model)

    def refuse(module: nn.Module, args: object) -> None:
        if module is not own() and torch.is_grad_enabled() and (module.training or in_evaluation):
            raise RefusedError(
                f"{who} was set up for another model, and this is a copy of it",
                fix="copy the plain model, and apply the technique to the copy",
            )

    model.register_forward_pre_hook(refuse)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward. Also switch off torch's fused encoder layers in this process, because in evaluation
    they read weights without calling forward."""
    torch.backends.mha.set_fastpath_enabled(False)
    module.forward = forward  # type: ignore[method-assign]


def change_first(output: Any, change: Callable[[Any], Any]) -> Any:
    """Change the first element of a module's output, or the whole output if it is neither a tuple nor a list."""
    changed = change(first_of(output))
    if isinstance(output, list):
        return [changed, *output[1:]]
    return (changed, *output[1:]) if isinstance(output, tuple) else changed


def first_of(output: Any) -> Any:
    """Return the first element of a module's output, or the whole output if it is neither a tuple nor a list."""
    return output[0] if isinstance(output, tuple | list) else output


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return a mapping from each additional name of a shared tensor to the tensor's first name."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    firsts = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    return {name: known for name, known in firsts.items() if known != name}
