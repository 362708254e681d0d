"""Input dtypes of custom operations under autocast: cast to the autocast dtype, or unchanged."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(operation: Callable[P, T]) -> Callable[P, T]:
    """Decorate an operation to run without autocast, in the dtypes of its tensors.

    This is necessary because torch refuses to concatenate bfloat16 tensors under autocast to float16. Autocast is
    disabled for the device of the first argument.
    """

    @wraps(operation)
    def as_they_are(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.autocast(args[0].device.type, enabled=False):  # type: ignore[union-attr]
            return operation(*args, **kwargs)

    return as_they_are


def cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors cast to the autocast dtype, or unchanged if autocast is off. torch's own attention casts in
    the same way.
    """
    device = "cpu" if tensors[0].is_meta else tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors)
