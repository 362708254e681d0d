"""Recomputation of a function's forward pass during its backward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thrifty.core.randomness import GeneratorStates
from thrifty.core.written_buffers import BufferSnapshot

RERUN_FIX = (
    "a recomputed block must do the same each time; the routing of a mixture of experts does not if the block's input "
    "is quantized: --without memory.compress_activations"
)
"""Fix of the error for a block that saves other tensors when it is recomputed."""


def recompute(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    module: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Call `function(*args, **kwargs)`, dropping its intermediate tensors and recomputing them in the backward pass.

    `options` go to torch's `checkpoint`. The generators of torch, Python and NumPy return the same values again;
    buffers of `module` are written once.

    All arguments reach torch by position, because `checkpoint` restores the random state only for devices of positional
    tensors. With keyword arguments alone, dropout on a GPU would sample another mask the second time.
    """
    names, count = tuple(kwargs), len(args)
    modules = () if module is None else (module,)
    before = None if torch.compiler.is_compiling() else (BufferSnapshot(*modules), GeneratorStates())
    is_first = True

    def by_position(*values: Any) -> Any:
        nonlocal is_first
        named = dict(zip(names, values[count:], strict=True))
        if before is None:
            return function(*values[:count], **named)
        if is_first:
            is_first = False
            result = function(*values[:count], **named)
            before[0].forget_constant()
            return result
        with before[0].restored(), before[1].restored():
            return function(*values[:count], **named)

    return checkpoint(by_position, *args, *kwargs.values(), use_reentrant=False, **options)
