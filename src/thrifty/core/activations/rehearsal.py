"""A forward pass to learn from: the tapes of its blocks, and what a block's backward pass needs beside them.

Nothing of it stays: buffers and random numbers are as they were, and no gradient is left behind.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from thrifty.core.accounting import StepTrace, unseen
from thrifty.core.activations.tape import Cost, Tape, Where, record


@dataclass
class Rehearsal:
    """Collects the tapes of blocks in the order in which they are called."""

    cost: Cost
    where: Where
    tapes: list[Tape] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    temporary: list[int] = field(default_factory=list)
    """For each call the bytes that its passes need at their peak beside what is saved."""
    known: dict[Any, int] = field(default_factory=dict)

    def run(self, name: str, block: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        kind = (type(block), *(_likeness(p) for p in block.parameters()), *map(_likeness, tree_leaves((args, kwargs))))
        if kind not in self.known:
            self.known[kind] = temporary_bytes(function, args, kwargs)
        result, tape = record(function, args, kwargs, self.cost, self.where)
        self.tapes.append(tape)
        self.names.append(name)
        self.temporary.append(self.known[kind])
        return result


@contextmanager
def rehearsing(model: nn.Module, cost: Cost) -> Iterator[Rehearsal]:
    """Run the model forward inside the block; whatever else follows operations does not see it."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with unseen(), torch.random.fork_rng(devices), following(model) as where:
        yield Rehearsal(cost, where)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


@contextmanager
def following(model: nn.Module) -> Iterator[Where]:
    """What gives the name of the model's module that runs at the moment."""
    names, running = {id(module): name for name, module in model.named_modules()}, [""]

    def enter(module: nn.Module, args: tuple) -> None:
        running.append(names.get(id(module), running[-1]))

    def leave(module: nn.Module, args: tuple, result: Any) -> None:
        running.pop()

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield lambda: running[-1]
    finally:
        for hook in hooks:
            hook.remove()


def temporary_bytes(function: Callable[..., Any], args: tuple, kwargs: dict) -> int:
    """What a function's forward and backward pass, down to its inputs, hold at the peak beside what it saves."""
    args, kwargs = tree_map(_leaf, (args, kwargs))
    leaves = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    with StepTrace(*leaves) as live:
        results = [value for value in tree_leaves(function(*args, **kwargs)) if isinstance(value, Tensor)]
        results = [value for value in results if value.requires_grad]
        saved = live.now
        inputs = [value for value in leaves if value.requires_grad]
        if inputs and results:
            torch.autograd.grad(results, inputs, [torch.ones_like(value) for value in results], allow_unused=True)
    return live.peak - saved


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _likeness(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype, value.requires_grad
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value)
