"""Blocks that can be left out of a forward pass: their input goes on to the next block, and nothing is computed.

Each technique has gates of its own, so that several may decide about one block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.modeling.module_surgery import find_stacks, refuse_repeated, wrap_forward


def add_gates(model: nn.Module, owner: str) -> list[nn.Module]:
    """Gives every block of every stack a gate of this owner, open at first, and knowledge of its place in the stack:
    `gate_places[owner]` is (stack, number of the block counted from 0, number of blocks). Gives the blocks."""
    gated = []
    for stack, blocks in find_stacks(model).items():
        refuse_repeated(stack, blocks)
        for index, block in enumerate(blocks):
            vars(block).setdefault("gate_places", {})[owner] = (stack, index, len(blocks))
            setattr(block, _attribute(owner), True)
            wrap_forward(block, partial(_gated, _attribute(owner)))
            gated.append(block)
    return gated


def gated_blocks(model: nn.Module, owner: str) -> list[tuple[nn.Module, str, int, int]]:
    """The blocks with a gate of this owner that are here, each with its stack, its number and that of its peers."""
    return [
        (module, *places[owner])
        for module in model.modules()
        if owner in (places := vars(module).get("gate_places", {}))
    ]


@contextmanager
def gates(model: nn.Module, owner: str, is_open: Callable[[str, int, int], bool]) -> Iterator[None]:
    """Every gate of this owner as `is_open(stack, block, blocks)` says, for as long as the context lasts."""
    blocks = gated_blocks(model, owner)
    for block, *place in blocks:
        setattr(block, _attribute(owner), is_open(*place))
    try:
        yield
    finally:
        for block, *_ in blocks:
            setattr(block, _attribute(owner), True)


def _attribute(owner: str) -> str:
    return f"{owner.rpartition('.')[2]}_gate_is_open"


def _gated(attribute: str, block: nn.Module, inner: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not getattr(block, attribute):
        return x.view_as(x)  # a tensor of its own: some autograd hooks stand on what a block gives
    output = inner(x, *args, **kwargs)
    if not isinstance(output, Tensor):
        raise RefusedError(
            f"{type(block).__name__} gives a {type(output).__name__}, not hidden states: it cannot be left out",
            fix="take a model whose blocks map hidden states to hidden states",
        )
    return output
