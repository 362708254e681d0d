"""Python overhead of recomputing a block, measured on this machine."""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from thrifty.memory.op_trace import record
from thrifty.memory.selective_recompute import BlockPlan, keep_tensor, run_block_plan

LINKS, TIMES = 24, 5


@cache
def measured_overheads() -> tuple[float, float]:
    """Return the extra seconds per operation (forward and backward) of a planned block, and of a block recomputed as a
    whole. Both are measured on a chain of tiny CPU operations; the best of a few runs counts.
    """
    with _disable_current_modes(), unset_fake_temporarily(), torch.enable_grad():
        x = torch.ones(4, requires_grad=True)
        _, tape = record(_chain, (x,), {}, lambda *_: 0.0, lambda: "")
        saved = [number for number, item in tape.items.items() if item.saved]
        everything = frozenset(tape.items)
        half = BlockPlan(tape, dict.fromkeys(saved[::2], keep_tensor), everything - {*saved[::2]})
        plain, planned, whole = (
            _best(lambda plan=plan: _forward_backward(plan, x))  # type: ignore[misc]
            for plan in (None, half, BlockPlan(tape, {}, everything))
        )
    return tuple(max(each - plain, 0.0) / len(tape.operations) for each in (planned, whole))  # type: ignore[return-value]


def _chain(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = (x * 0.5).sin()
    return x


def _forward_backward(plan: BlockPlan | None, x: Tensor) -> None:
    result = _chain(x) if plan is None else run_block_plan(plan, _chain, (x,), {})
    torch.autograd.grad(result, x, torch.ones_like(x))


def _best(run: Callable[[], None]) -> float:
    seconds = []
    for _ in range(TIMES + 1):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
