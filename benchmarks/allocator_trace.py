"""What the steps of a run really hold, by the events of torch's own allocator: what a prediction is measured by.

No byte is counted here as predictions count them (`composition/step_footprint.py`): torch's profiler reports every
block of
memory that is given out and taken back, from before the model is made, inside of operations too.
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
    """Bytes that a run on a processor got from the allocator; what lies in mapped files or came from elsewhere is
    not among them. Parameters and optimizer state as the run ends, gradients as its last update begins."""

    parameters: int
    gradients: int
    optimizer: int
    standing: tuple[int, ...]
    """Of all that is there before each step."""
    peaks: tuple[int, ...]
    """The most at any time of each step."""
    changed: tuple[bool, ...]
    """Whether a step began with a change of structure: it holds the old model beside the new one."""

    @property
    def peak(self) -> int:
        """The most in any step without such a change."""
        return max(peak for peak, changed in zip(self.peaks, self.changed, strict=True) if not changed)


def measure_allocations(run: Run, seed: int = 0) -> AllocationReport:
    """Trains the run to its end, on one thread, and tells what it held."""
    gradients: set[int] = set()
    changed: list[bool] = []

    def update_begins(optimizer: TransformOptimizer, *given: Any) -> None:
        gradients.clear()
        gradients.update(_addresses(p.grad for p in optimizer.parameters if p.grad is not None))
        with record_function(UPDATE):
            pass

    with one_thread(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
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
    sizes, standing, peaks = _replayed(watched, parameters, gradients, slots)
    return AllocationReport(*sizes, standing, peaks, tuple(changed))


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in local_tensors([*tensors])}


def _replayed(
    watched: profile, parameters: set[int], gradients: set[int], slots: set[int]
) -> tuple[tuple[int, int, int], tuple[int, ...], tuple[int, ...]]:
    """What the allocator gave out, block by block over the whole run: the bytes of the three at these addresses, and of
    all before and at the peak of each step."""
    blocks = AllocatedBlocks()
    standing: list[int] = []
    peaks: list[int] = []
    of_gradients = 0
    for event in _in_order(watched):
        if event.name == STEP:
            standing.append(blocks.now)
            peaks.append(blocks.now)
        elif event.name == UPDATE:
            of_gradients = blocks.bytes_at(gradients)
        kind, block = event.typed
        if kind != _EventType.Allocation:
            continue
        if block.alloc_size > 0:
            blocks.give(block.ptr, block.alloc_size)
        else:
            blocks.take_back(block.ptr)
        if peaks:
            peaks[-1] = max(peaks[-1], blocks.now)
    return (blocks.bytes_at(parameters), of_gradients, blocks.bytes_at(slots)), tuple(standing), tuple(peaks)


class AllocatedBlocks:
    """Memory that was given out and not taken back yet."""

    def __init__(self) -> None:
        self.now = 0
        """Bytes of all of it."""
        self._sizes: dict[int, int] = {}
        self._starts: list[int] = []

    def give(self, start: int, size: int) -> None:
        """What was there was taken back unseen: a process group's own thread may be the last to let go of a tensor,
        and the profiler does not watch that."""
        at = bisect_right(self._starts, start)
        if at and self._starts[at - 1] + self._sizes[self._starts[at - 1]] > start:
            at -= 1
        while at < len(self._starts) and self._starts[at] < start + size:
            self.take_back(self._starts[at])
        insort(self._starts, start)
        self._sizes[start] = size
        self.now += size

    def take_back(self, start: int) -> None:
        if size := self._sizes.pop(start, 0):
            del self._starts[bisect_left(self._starts, start)]
            self.now -= size

    def bytes_at(self, addresses: set[int]) -> int:
        return sum(self._sizes.get(address, 0) for address in addresses)


def _in_order(watched: profile) -> list[Any]:
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    events, waiting = [], list(watched.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        events.append(event)
        waiting += event.children
    return sorted(events, key=lambda event: event.start_time_ns)
