"""A forward pass that is run again for the backward pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.checkpoint import checkpoint


def recompute(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **how: Any) -> Any:
    """`function(*args, **kwargs)`, whose intermediate tensors are dropped and computed again when the backward pass
    needs them. `how` are further arguments of torch's `checkpoint`.

    Everything goes to torch by position: it puts back the random state of those devices only that it finds tensors of
    there, and with a block called by name alone dropout on a GPU would be another one the second time.
    """
    names, count = tuple(kwargs), len(args)

    def by_position(*values: Any) -> Any:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return checkpoint(by_position, *args, *kwargs.values(), use_reentrant=False, **how)
