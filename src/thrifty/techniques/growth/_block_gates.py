"""Gates that skip blocks in a forward pass. A closed gate passes the block's input unchanged to the next block.

Each technique (`owner`) has its own gates, so that several techniques may skip the same block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.modeling.module_surgery import find_stacks, refuse_repeated, wrap_forward


def add_gates(model: nn.Module, owner: str) -> list[nn.Module]:
    """Add a gate, initially open, to every block of every stack, and return the blocks.

    `owner` is the name of the technique that uses the gates. The block's attribute `gate_places[owner]` is (stack,
    index of the block, number of blocks in the stack).
    """
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
    """Return the blocks with a gate of `owner`, each as (block, stack, index of the block, number of blocks in the
    stack)."""
    return [
        (module, *places[owner])
        for module in model.modules()
        if owner in (places := vars(module).get("gate_places", {}))
    ]


@contextmanager
def gates(model: nn.Module, owner: str, is_open: Callable[[str, int, int], bool]) -> Iterator[None]:
    """Open the gates of `owner` for which `is_open(stack, index, blocks)` is true, and close the others, inside the
    context."""
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
        return x.view_as(x)  # a new tensor, because other code registers autograd hooks on a block's output
    output = inner(x, *args, **kwargs)
    if not isinstance(output, Tensor):
        raise RefusedError(
            f"{type(block).__name__} returns a {type(output).__name__}, not hidden states, so it cannot be skipped",
            fix="--set model.preset=llama-nano; or another model whose blocks map hidden states to hidden states",
        )
    return output
