"""Cost of a single operation: measured on this machine in isolation, or counted from its shapes."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from thrifty.core.op_flops import FLOPS_OF
from thrifty.core.tensor_tracing import fillable, tensors_in

FLOPS_PER_SECOND = {"cpu": 1e11, "cuda": 1e14}
BYTES_PER_SECOND = {"cpu": 1e10, "cuda": 1e12}
"""Bandwidth in bytes/s of a typical device of each kind, for costs that must not depend on the actual device."""


def counted_seconds(func: Any, args: tuple, kwargs: dict, result: Any) -> float:
    """Return the seconds of an operation on a typical device: the longer of compute time and memory time."""
    tensors = tensors_in((args, kwargs, result))
    device = tensors[0].device.type if tensors else "cpu"
    formula = FLOPS_OF.get(getattr(func, "overloadpacket", None))
    flops = formula(*args, **kwargs, out_val=result) if formula else 0
    touched = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    by_flops = flops / FLOPS_PER_SECOND.get(device, 1e14)
    return max(by_flops, touched / BYTES_PER_SECOND.get(device, 1e12))


class MeasuredSeconds:
    """Timer of operations, run on random tensors with the shapes of the arguments. Each kind of operation is timed
    once; the best of a few runs counts.

    If an operation fails on random tensors, its cost is counted instead.
    """

    def __init__(self, times: int = 3):
        self.times = times
        self.known: dict[Any, float] = {}

    def __call__(self, func: Any, args: tuple, kwargs: dict, result: Any) -> float:
        key = (func, *map(_likeness, tree_leaves((args, kwargs))))
        if key not in self.known:
            try:
                with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
                    real_args, real_kwargs = tree_map_only(Tensor, _random_like, (args, kwargs))
                    self.known[key] = self._best(lambda: func(*real_args, **real_kwargs), _device(real_args))
            except Exception:  # the operation does not accept random values
                self.known[key] = counted_seconds(func, args, kwargs, result)
        return self.known[key]

    def _best(self, run: Callable[[], Any], device: torch.device) -> float:
        seconds = []
        for _ in range(self.times + 1):
            began = _now(device)
            run()
            seconds.append(_now(device) - began)
        return min(seconds[1:])


def _likeness(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype, value.device
    return repr(value)


def _random_like(tensor: Tensor) -> Tensor:
    filled = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    elements = fillable(filled)
    elements.normal_() if elements.is_floating_point() else elements.zero_()
    return filled


def _device(args: tuple) -> torch.device:
    return next((tensor.device for tensor in tensors_in(args)), torch.device("cpu"))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
