"""Modules that hold the matrices of all experts in one parameter each, as the mixtures of experts of transformers."""

import re

from torch import Tensor, nn

_FIRST = re.compile(r"(gate_?up|gate|up|w1|w3|w13|wi|fc1)(_proj)?")
_LAST = re.compile(r"(down|w2|wo|fc2)(_proj)?")


def is_expert_stack(module: nn.Module) -> bool:
    """Return True if all parameters of a module are its own, and some are stacks of matrices (experts, …, …), known by
    their names: first and last layers of feed-forward networks."""
    stacks = _stacks(module)
    if not stacks or any(True for child in module.children() for _ in child.parameters()):
        return False
    firsts = [stack for name, stack in stacks.items() if _FIRST.fullmatch(name)]
    lasts = [stack for name, stack in stacks.items() if _LAST.fullmatch(name)]
    return bool(firsts) and len(lasts) == 1 and len({len(stack) for stack in (*firsts, *lasts)}) == 1


def stacked_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters (experts, …, …) of an expert stack that contain matrices."""
    return [stack for name, stack in _stacks(module).items() if _FIRST.fullmatch(name) or _LAST.fullmatch(name)]


def is_transposed_stack(module: nn.Module) -> bool:
    """Return True if an expert stack stores its matrices as (in, out). Without the attribute `is_transposed` of
    transformers, the shapes decide; square matrices count as (out, in)."""
    if isinstance(known := getattr(module, "is_transposed", None), bool):
        return known
    first, last = (
        next(each for name, each in _stacks(module).items() if kind.fullmatch(name)) for kind in (_FIRST, _LAST)
    )
    return first.shape[2] != last.shape[1]


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
    return {name: parameter for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3}
