"""Recomputation of a function's forward pass during its backward pass (gradient checkpointing)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from thrifty.core.randomness import GeneratorStates
from thrifty.core.written_buffers import BufferSnapshot

A = TypeVar("A")

_FIXED = (
    {"respect_saved_tensors_hooks": False}
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else {}
)
"""Tensors that a selective policy keeps bypass the hooks of other techniques. Newer torch warns without this argument,
because its default will change."""

RERUN_FIX = (
    "make the block deterministic; or, for a mixture of experts with quantized inputs, "
    "--without memory.compress_activations"
)
"""Fix for a block that saves different tensors when it is recomputed than in its forward pass."""


def recompute(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    module: nn.Module | None = None,
    **options: Any,
) -> Any:
    """Call `function(*args, **kwargs)`, drop its intermediate tensors, and recompute them in the backward pass.

    `options` are passed to torch's `checkpoint`. The generators of torch, Python and NumPy return the same values in
    the recomputation. Buffers of `module` are written only once.

    Without gradients, as in generation, only the function is called. Otherwise, key-value caches that the block would
    only fill are left out (`without_caches`).

    All arguments are passed to torch by position, because `checkpoint` restores the random state only for devices of
    positional tensors. With keyword arguments, dropout on a GPU would sample a new mask in the recomputation.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    args, kwargs = without_caches(args, module), without_caches(kwargs, module)
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

    return checkpoint(by_position, *args, *kwargs.values(), use_reentrant=False, **_FIXED, **options)


def without_caches(arguments: A, module: nn.Module | None) -> A:
    """Return a tuple or dictionary of a block's arguments with None in place of key-value caches of transformers that
    have no entry for the block. In training, the block would fill its entry without reading it, and a recomputation
    would fill it twice. A cache with an entry, such as a prefix, stays."""
    modules = () if module is None else module.modules()
    places = (getattr(each, "layer_idx", None) for each in modules)
    place = next((place for place in places if isinstance(place, int)), 0)

    def is_unread(value: Any) -> bool:
        if type(value).__module__ != "transformers.cache_utils":
            return False
        if not hasattr(value, "layers"):
            return value.get_seq_length(place) == 0
        layer = next(iter(value.layers[place:]), None)
        states = getattr(layer, "has_previous_state", {})  # of linear attention and state spaces
        has_keys = hasattr(layer, "get_seq_length") and layer.get_seq_length()
        return not has_keys and not any(states.values() if isinstance(states, dict) else [states])

    return tree_map_only(is_unread, lambda cache: None, arguments, is_leaf=is_unread)
