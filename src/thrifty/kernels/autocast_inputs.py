"""Inputs of a custom operation, cast by autocast or unchanged."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(operation: Callable[P, T]) -> Callable[P, T]:
    """Run an operation in the dtypes of its tensors, on the device of the first.

    Under autocast to float16, torch refuses to concatenate tensors of bfloat16.
    """

    @wraps(operation)
    def as_they_are(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(args[0].device.type, enabled=False):  # type: ignore[union-attr]
            return operation(*args, **kwargs)

    return as_they_are


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype that autocast uses for matrix products, like inputs of torch's own attention."""
    device = "cpu" if tensors[0].is_meta else tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
