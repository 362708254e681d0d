"""Dtypes of a custom operation's inputs under autocast: cast, or unchanged."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(operation: Callable[P, T]) -> Callable[P, T]:
    """Decorate an operation to run without autocast, in the dtypes of its tensors.

    Under autocast to float16, torch refuses to concatenate bfloat16 tensors. The first tensor's device is used.
    """

    @wraps(operation)
    def as_they_are(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(args[0].device.type, enabled=False):  # type: ignore[union-attr]
            return operation(*args, **kwargs)

    return as_they_are


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the autocast dtype of matmuls, as torch's own attention does."""
    device = "cpu" if tensors[0].is_meta else tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
