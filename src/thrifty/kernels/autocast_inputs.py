"""The inputs of a custom operation as autocast would cast them, or as they are."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(operation: Callable[P, T]) -> Callable[P, T]:
    """An operation that computes in the formats of its tensors, of which the first decides the device: under autocast
    to float16 torch refuses, among others, to join tensors of bfloat16."""

    @wraps(operation)
    def as_they_are(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(args[0].device.type, enabled=False):  # type: ignore[union-attr]
            return operation(*args, **kwargs)

    return as_they_are


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype that products of them are to have, as torch's own attention takes them."""
    device = "cpu" if tensors[0].is_meta else tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
