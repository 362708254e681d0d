"""Gates that skip blocks in a forward pass. A closed gate passes the block's input unchanged to the next block.

Each technique (`owner`) has its own gates, so that several techniques may skip the same block.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.core.randomness import preserved_draws
from thrifty.modeling.module_surgery import find_stacks, refuse_repeated, wrap_forward

Form = tuple[int | str | None, ...] | None
"""Form of a block's output: None for hidden states alone; for a tuple, the inputs that follow the hidden states, by
index or name, with None for None."""


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
    if getattr(block, attribute):
        output = inner(x, *args, **kwargs)
        if not hasattr(block, "gate_form"):
            block.gate_form = _form_of(block, output, args, kwargs)
        return output
    if not hasattr(block, "gate_form"):  # as after a resume
        block.gate_form = _tried_form(block, inner, x, args, kwargs)
    same = x.view_as(x)  # a new tensor, because other code registers autograd hooks on a block's output
    if block.gate_form is None:
        return same
    return (
        same,
        *(kwargs.get(key) if isinstance(key, str) else None if key is None else args[key] for key in block.gate_form),
    )


@torch.compiler.disable
def _tried_form(block: nn.Module, inner: Any, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    with torch.no_grad(), preserved_draws([x]):
        return _form_of(block, inner(x, *args, **kwargs), args, kwargs)


def _form_of(block: nn.Module, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    """Return the form of a block's output. Raise RefusedError for an output that its inputs do not determine."""
    if isinstance(output, Tensor):
        return None
    form: list[int | str | None] = []
    named = [*enumerate(args), *kwargs.items()]
    for each in output[1:] if isinstance(output, tuple | list) and output else (block,):
        places = [key for key, value in named if value is each]
        if each is not None and not places:
            raise RefusedError(
                f"{type(block).__name__} returns more than hidden states, such as biases that later blocks need, so it "
                "cannot be skipped",
                fix="--set model.preset=llama-nano; or another model whose blocks map hidden states to hidden states",
            )
        form.append(None if each is None else places[0])
    return tuple(form)
