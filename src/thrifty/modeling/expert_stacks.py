"""Modules that hold the matrices of all experts in one parameter each, as the mixtures of experts of transformers."""

import re

from torch import Tensor, nn

_FIRST = re.compile(r"(gate_?up|gate|up|w1|w3|w13|wi|fc1)(_proj)?")
_LAST = re.compile(r"(down|w2|wo|fc2)(_proj)?")


def is_expert_stack(module: nn.Module) -> bool:
    """Return True if all parameters of a module are stacks of matrices (experts, …, …) and of biases (experts, …),
    known by their names: first and last layers of feed-forward networks. Their layout must be known too."""
    own = dict(module.named_parameters())
    stacks = _stacks(module)
    firsts = [stack for name, stack in stacks.items() if _FIRST.fullmatch(name)]
    lasts = [stack for name, stack in stacks.items() if _LAST.fullmatch(name)]
    if not firsts or len(lasts) != 1 or len({len(stack) for stack in stacks.values()}) != 1:
        return False
    is_known = all(name in stacks or name.removesuffix("_bias") in stacks or name == "gain" for name in own)
    return is_known and _layout(module, firsts[0], lasts[0]) is not None


def stacked_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters (experts, …, …) of an expert stack that contain matrices."""
    return [*_stacks(module).values()]


def is_transposed_stack(module: nn.Module) -> bool:
    """Return True if an expert stack stores its matrices as (in, out)."""
    first, last = (
        next(each for name, each in _stacks(module).items() if kind.fullmatch(name)) for kind in (_FIRST, _LAST)
    )
    return _layout(module, first, last) is True


def _layout(module: nn.Module, first: Tensor, last: Tensor) -> bool | None:
    """Return True if matrices are stored as (in, out): by the attribute `is_transposed` of transformers, or if the
    first layer computes gate and value, by the shapes. Return None if the layout is unknown."""
    if isinstance(known := getattr(module, "is_transposed", None), bool):
        return known
    fits = {False: (first.shape[2], first.shape[1]), True: (first.shape[1], first.shape[2])}
    sizes = {False: (last.shape[1], 2 * last.shape[2]), True: (last.shape[2], 2 * last.shape[1])}
    return next((layout for layout in fits if fits[layout] == sizes[layout]), None)


def last_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the experts' last layers: their matrices, and their biases (experts, d), if any."""
    own = {name: parameter for name, parameter in module.named_parameters(recurse=False)}
    return {name: parameter for name, parameter in own.items() if _LAST.fullmatch(name.removesuffix("_bias"))}


def stack_width(module: nn.Module) -> int:
    """Return the number of channels in the output of an expert stack."""
    last = next(each for each in last_parameters(module).values() if each.ndim == 3)
    return last.shape[2 if is_transposed_stack(module) else 1]


def scale_outputs(module: nn.Module, gain: Tensor) -> None:
    """Multiply the outputs of an expert stack, channel by channel, by `gain` (d,). Call without gradients."""
    for parameter in last_parameters(module).values():
        is_rows = parameter.ndim == 3 and not is_transposed_stack(module)
        parameter.mul_(gain[:, None] if is_rows else gain)


def _stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of 3 dims whose names are those of first and last layers."""
    own = module.named_parameters(recurse=False)
    return {name: each for name, each in own if each.ndim == 3 and (_FIRST.fullmatch(name) or _LAST.fullmatch(name))}
