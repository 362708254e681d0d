"""Bytes that kernels of this processor take and free inside one operation, measured by running it once.

Convolutions copy their operands into layouts of their own, or into columns. Which of them, and how large the copies
are, depends on the processor, the sizes and the number of threads, and no formula of torch's states it.
"""

from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

LARGEST = 2**25
"""Bytes of the operands up to which an operation is run as it is; more examples are extrapolated from fewer."""
FEWEST = 16
"""Examples from which on torch chooses kernels as for any larger number."""
EXAMPLES = {
    torch.ops.aten.convolution.default: (0,),
    torch.ops.aten._convolution.default: (0,),
    torch.ops.aten.convolution_backward.default: (0, 1),
}
"""Operations that are measured, and which arguments have a row for each example."""


def workspace_bytes(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], threads: int) -> int:
    """Return the bytes that an operation takes beyond its results at its peak; 0 for one that is not measured."""
    places = EXAMPLES.get(func)
    if places is None or args[0].device.type != "cpu":
        return 0
    leaves, structure = tree_flatten((args, kwargs))
    described = tuple(_OperandShape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    examples, row = args[0].shape[0], sum(args[place].nbytes for place in places) // max(args[0].shape[0], 1)
    fewer = max(LARGEST // max(row, 1), min(FEWEST, examples), 2)
    if fewer >= examples:
        return _measured(func, described, structure, examples, examples, threads)
    half = max(fewer // 2, 1)
    most, less = (_measured(func, described, structure, examples, count, threads) for count in (fewer, half))
    return round(most + (most - less) / (fewer - half) * (examples - fewer))


class _OperandShape(tuple):
    @classmethod
    def of(cls, tensor: Tensor) -> "_OperandShape":
        return cls((tuple(tensor.shape), tensor.stride(), tensor.dtype))

    def tensor(self, examples: int, count: int) -> Tensor:
        """Make a tensor of ones, with `count` rows if it has one for each of the examples."""
        shape, stride, dtype = self
        return torch.empty_strided((count if shape[0] == examples else shape[0], *shape[1:]), stride, dtype=dtype)


@cache
def _measured(func: Any, described: tuple, structure: Any, examples: int, count: int, threads: int) -> int:
    """In a thread of its own, in which no mode and no profiler of the caller's is open."""
    found: list[int] = []

    def run() -> None:
        places = set(EXAMPLES[func])
        operands = [
            each.tensor(examples if place in places else -1, count).fill_(1)
            if isinstance(each, _OperandShape)
            else each
            for place, each in enumerate(described)
        ]
        args, kwargs = tree_unflatten(operands, structure)
        with torch.no_grad():
            func(*args, **kwargs)  # the first call prepares the kernel
            found.append(_bytes_within(lambda: func(*args, **kwargs)))

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        thread = Thread(target=run)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    return found[0] if found else 0


def _bytes_within(call: Callable[[], Any]) -> int:
    """Return by how many bytes the peak of a call exceeds what it leaves, as torch's allocator reports them."""
    config = torch._C._profiler._ExperimentalConfig()
    state = torch.autograd.ProfilerState.CPU
    torch.autograd._enable_profiler_legacy(
        torch.autograd.ProfilerConfig(state, False, True, False, False, False, config)
    )
    try:
        result = call()
    finally:
        events = torch.autograd._disable_profiler_legacy()
    del result
    now = most = 0
    for event in (event for some in events for event in some if event.kind() == "memory_alloc"):
        now += event.cpu_memory_usage()
        most = max(most, now)
    return most - now
