"""Workspace of CPU kernels, measured by running an operation once.

Convolutions copy their operands into other layouts or into columns. Most other kernels copy operands that are not
contiguous. Recurrent layers save their gates for the backward pass. The number of bytes depends on the processor, the
sizes and the number of threads. torch has no formula for this number.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

LARGEST = 2**25
"""Maximum operand bytes of an operation that is run at full size. Larger operations are extrapolated from fewer
rows."""
FEWEST = 16
"""Minimum number of examples for which torch chooses the same kernels as for any larger number."""
RECURRENT, RECURRENT_BACKWARD = (
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten.mkldnn_rnn_layer_backward.default,
)
ROWS = {
    torch.ops.aten.convolution.default: (0,),
    torch.ops.aten._convolution.default: (0,),
    torch.ops.aten.convolution_backward.default: (0, 1),
    torch.ops.aten.native_batch_norm_backward.default: (0, 1),
    torch.ops.aten.max_pool2d_with_indices_backward.default: (0, 1, -1),
    torch.ops.aten.upsample_nearest2d.default: (0,),
    torch.ops.aten.upsample_bilinear2d.default: (0,),
    torch.ops.aten.im2col.default: (0,),
    torch.ops.aten.logsumexp.default: (0,),
    torch.ops.aten.mean.dim: (0,),
    torch.ops.aten._safe_softmax.default: (0,),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2, 3, 4, 5),
    RECURRENT: (0,),
    RECURRENT_BACKWARD: (0, 7, 10),
}
"""Operations that are always measured, with the indices of arguments that have a row per example or time step. Other
operations are measured if an operand is not contiguous. Their row arguments are arguments with as many rows and dims as
the first argument."""
PRODUCTS = frozenset(getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm", "baddbmm"))


@dataclass(frozen=True)
class KernelMemory:
    inside: int = 0
    """Bytes at the peak in addition to the results."""
    last: int = 0
    """Bytes of the operation's last result."""


def workspace_bytes(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], threads: int) -> int:
    """Return the peak bytes that an operation allocates in addition to its results; 0 if it is not measured."""
    is_measured = func in ROWS or _may_copy(func, args)
    return _memory(func, args, kwargs, threads).inside if is_measured else 0


def _may_copy(func: Any, args: tuple) -> bool:
    """Return True if an operand is not contiguous, so that the kernel may copy it."""
    if func.namespace != "aten" or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if "linalg" in func.name():  # decompositions take too long to run once more
        return False
    operands = [each for each in args if isinstance(each, Tensor) and each.layout is torch.strided]
    readable = (each.is_contiguous() or (func in PRODUCTS and each.mT.is_contiguous()) for each in operands)
    return bool(operands) and operands[0] is args[0] and not all(readable)


def with_kept_gates(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], results: Any) -> Any:
    """Return a recurrent layer's results on fake tensors with its saved gates, which torch's fake kernel omits."""
    if func is not RECURRENT or results[-1] is None:
        return results
    gate_bytes = _memory(func, args, kwargs, torch.get_num_threads()).last
    return (*results[:-1], args[0].new_empty(gate_bytes, dtype=torch.uint8))


def _memory(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any], threads: int) -> KernelMemory:
    if args[0].device.type != "cpu":
        return KernelMemory()
    leaves, structure = tree_flatten((args, kwargs))
    described = tuple(_OperandShape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    places = ROWS.get(func) or tuple(
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.ndim == args[0].ndim > 0 and leaf.shape[0] == args[0].shape[0]
    )
    rows = args[0].shape[0] if args[0].ndim else 1
    row = sum(leaves[place].nbytes for place in places if leaves[place] is not None) // max(rows, 1)
    fewer = max(LARGEST // max(row, 1), min(FEWEST, rows), 2)
    if fewer >= rows:
        return _measured(func, described, structure, places, rows, rows, threads)
    half = max(fewer // 2, 1)
    most, less = (_measured(func, described, structure, places, rows, count, threads) for count in (fewer, half))
    further = (rows - fewer) / (fewer - half)
    return KernelMemory(
        round(most.inside + (most.inside - less.inside) * further), round(most.last + (most.last - less.last) * further)
    )


class _OperandShape(tuple):
    @classmethod
    def of(cls, tensor: Tensor) -> "_OperandShape":
        return cls((tuple(tensor.shape), tensor.stride(), tensor.dtype))

    def new_tensor(self, rows: int | None = None) -> Tensor:
        """Return a tensor of ones, or of zeros (valid indices) for integers, with at most `rows` rows."""
        shape, stride, dtype = self
        shape = shape if rows is None else (min(rows, shape[0]), *shape[1:])
        elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        value = 1 if dtype.is_floating_point or dtype.is_complex else 0
        return torch.full((max(elements, 1),), value, dtype=dtype).as_strided(shape, stride)


@cache
def _measured(
    func: Any, described: tuple, structure: Any, places: tuple[int, ...], rows: int, count: int, threads: int
) -> KernelMemory:
    """Return the memory of one call. The call runs in a new thread, outside the caller's dispatch modes and
    profilers."""
    measured: list[KernelMemory] = []

    def run() -> None:
        fewer = {place % len(described): count for place in places}
        if func is RECURRENT_BACKWARD:  # has gates of all time steps and of one more
            fewer[len(described) - 1] = 2 * described[-1][0][0] * count // rows
        operands = [
            each.new_tensor(fewer.get(place)) if isinstance(each, _OperandShape) else each
            for place, each in enumerate(described)
        ]
        args, kwargs = tree_unflatten(operands, structure)
        with suppress(Exception):  # an operation that fails with fewer rows or these values is not measured
            func(*args, **kwargs)  # the first call prepares the kernel
            measured.append(_memory_of(lambda: func(*args, **kwargs)))

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        thread = Thread(target=run)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    return measured[0] if measured else KernelMemory()


def _memory_of(call: Callable[[], Any]) -> KernelMemory:
    """Return the bytes that a call allocates, from the events of torch's allocator."""
    config = torch._C._profiler._ExperimentalConfig()
    state = torch.autograd.ProfilerState.CPU
    torch.autograd._enable_profiler_legacy(
        torch.autograd.ProfilerConfig(state, False, True, False, False, False, config)
    )
    try:
        results = call()
    finally:
        events = torch.autograd._disable_profiler_legacy()
    now = most = 0
    for event in (event for some in events for event in some if event.kind() == "memory_alloc"):
        now += event.cpu_memory_usage()
        most = max(most, now)
    last = results[-1] if isinstance(results, tuple) else results
    return KernelMemory(most - now, last.nbytes if isinstance(last, Tensor) else 0)
