"""A forward pass that is run again for the backward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thrifty.core.randomness import GeneratorStates
from thrifty.core.written_buffers import BufferSnapshot

RERUN_FIX = (
    "a block that is to run again must do the same each time; the routing of a mixture of experts does not where the "
    "block's input comes back rounded: --without memory.compress_activations"
)
"""Fix where a block saves other tensors when it runs again."""


def recompute(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    module: nn.Module | None = None,
    **how: Any,
) -> Any:
    """`function(*args, **kwargs)`, whose intermediate tensors are dropped and computed again when the backward pass
    needs them. `how` are further arguments of torch's `checkpoint`. Python's and NumPy's generators draw the same
    again, as torch's do; buffers of `module` are written once.

    Everything goes to torch by position: it puts back the random state of those devices only that it finds tensors of
    there, and with a block called by name alone dropout on a GPU would be another one the second time.
    """
    names, count = tuple(kwargs), len(args)
    modules = () if module is None else (module,)
    before = None if torch.compiler.is_compiling() else (BufferSnapshot(*modules), GeneratorStates())
    is_first = True

    def by_position(*values: Any) -> Any:
        nonlocal is_first
        given = dict(zip(names, values[count:], strict=True))
        if before is None:
            return function(*values[:count], **given)
        if is_first:
            is_first = False
            result = function(*values[:count], **given)
            before[0].forget_constant()
            return result
        with before[0].restored(), before[1].restored():
            return function(*values[:count], **given)

    return checkpoint(by_position, *args, *kwargs.values(), use_reentrant=False, **how)
