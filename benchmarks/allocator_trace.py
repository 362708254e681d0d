"""Measured memory of a run's steps from the events of torch's allocator: the reference for predictions.

It shares no counting with predictions (`composition/step_footprint.py`). torch's profiler reports every allocated and
freed block, from before the model is built, including those inside operations.
"""

import gc
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from thrifty.composition.compose import Run
from thrifty.core.shard_layout import local_tensors
from thrifty.core.tensor_tracing import one_thread
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.training.loop import train

STEP, UPDATE = "thrifty: a step", "thrifty: its update begins"


@dataclass(frozen=True)
class AllocationReport:
    """Bytes that a CPU run received from torch's allocator, without mapped files and other allocators.

    Parameters and optimizer state are measured at the end of the run, gradients at the start of its last update.
    """

    parameters: int
    gradients: int
    optimizer: int
    standing: tuple[int, ...]
    """Allocated bytes before each step."""
    peaks: tuple[int, ...]
    """Peak of each step."""
    changed: tuple[bool, ...]
    """True for each step that began with a structural change, which holds the old model in addition to the new one."""

    @property
    def peak(self) -> int:
        """Peak of any step without a structural change."""
        return max(peak for peak, changed in zip(self.peaks, self.changed, strict=True) if not changed)


def measure_allocations(run: Run, seed: int = 0) -> AllocationReport:
    """Train the run to its end on one thread, and return the memory that it held."""
    gradients: set[int] = set()
    changed: list[bool] = []

    def update_begins(optimizer: TransformOptimizer, *arguments: Any) -> None:
        gradients.clear()
        gradients.update(_addresses(p.grad for p in optimizer.parameters if p.grad is not None))
        with record_function(UPDATE):
            pass

    with one_thread(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = run.start()
        with closing(train(run, state, seed)) as records:
            for _ in range(run.steps):
                gc.collect()
                assert state.model is not None and state.optimizer is not None
                hook = state.optimizer.register_step_pre_hook(update_begins)
                with record_function(STEP):
                    changed.append(bool(next(records).changes))
                hook.remove()
        parameters = _addresses(state.model.parameters())
        slots = _addresses(tensor for tensors in state.optimizer.slots.values() for tensor in tensors)
    sizes, standing, peaks = _replay(profiler, parameters, gradients, slots)
    return AllocationReport(*sizes, standing, peaks, tuple(changed))


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in local_tensors([*tensors])}


def _replay(
    profiler: profile, parameters: set[int], gradients: set[int], slots: set[int]
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[int, ...]]:
    """Replay the allocations of the whole run.

    Return the bytes of the blocks at the three sets of addresses, and those of all blocks before and at the peak of
    each step.
    """
    blocks = AllocatedBlocks()
    standing: list[int] = []
    peaks: list[int] = []
    of_gradients = 0
    for event in _in_order(profiler):
        if event.name == STEP:
            standing.append(blocks.now)
            peaks.append(blocks.now)
        elif event.name == UPDATE:
            of_gradients = blocks.bytes_at(gradients)
        kind, block = event.typed
        if kind != _EventType.Allocation:
            continue
        if block.alloc_size > 0:
            blocks.allocate(block.ptr, block.alloc_size)
        else:
            blocks.free(block.ptr)
        if peaks:
            peaks[-1] = max(peaks[-1], blocks.now)
    return (blocks.bytes_at(parameters), of_gradients, blocks.bytes_at(slots)), tuple(standing), tuple(peaks)


class AllocatedBlocks:
    """Currently allocated memory blocks."""

    def __init__(self) -> None:
        self.now = 0
        """Total allocated bytes."""
        self._sizes: dict[int, int] = {}
        self._starts: list[int] = []

    def allocate(self, start: int, size: int) -> None:
        """Add a block; overlapping blocks were freed without an event.

        The thread of a process group may release a tensor last, and the profiler does not record that thread.
        """
        at = bisect_right(self._starts, start)
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] > start:
            at -= 1
        while at < len(self._starts) and self._starts[at] < start + size:
            self.free(self._starts[at])
        insort(self._starts, start)
        self._sizes[start] = size
        self.now += size

    def free(self, start: int) -> None:
        if size := self._sizes.pop(start, 0):
            del self._starts[bisect_left(self._starts, start)]
            self.now -= size

    def bytes_at(self, addresses: set[int]) -> int:
        return sum(self._sizes.get(address, 0) for address in addresses)


def _in_order(profiler: profile) -> list[Any]:
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events, pending = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        events.append(event)
        pending += event.children
    return sorted(events, key=lambda event: event.start_time_ns)
