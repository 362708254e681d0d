"""Dry run of a forward pass. It records the operations of each block and the peak memory of the block's backward pass.

Buffers and the random state are restored afterwards. No gradients are stored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from thrifty.core.randomness import preserved_draws
from thrifty.core.tensor_tracing import StepTrace, storage_bytes, tensors_in, track_running_module, untraced
from thrifty.memory.block_costs import counted_stage
from thrifty.memory.op_trace import INPUT, Cost, OpTrace, Where, record
from thrifty.memory.peak_intervals import PeakInterval, peak_intervals
from thrifty.memory.recompute_schedule import ChainStageCost


@dataclass(frozen=True)
class BlockMemory:
    """Memory of a block call, in addition to the contents of its trace."""

    temporary: int
    """Peak bytes of forward and backward pass in addition to saved tensors."""
    stage: ChainStageCost | None
    """Counted cost of the call as part of a chain. None if the cost depends on values."""
    intervals: Sequence[PeakInterval]


@dataclass
class DryRun:
    """Traces of blocks in the order of their calls."""

    cost: Cost
    where: Where
    tapes: list[OpTrace] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    memories: list[BlockMemory] = field(default_factory=list)
    """Memory of each call, in the order of `tapes`."""
    streams: bool = False
    """True to also count peak intervals of calls whose saved tensors are offloaded."""
    known: dict[Any, BlockMemory] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    """Outputs of the previous call."""
    moved: list[StorageWeakRef | None] = field(default_factory=list)
    """For each call, the storage of its input if the input can be offloaded."""
    inputs: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Input storages of all calls. Weak references also prevent reuse of the addresses."""

    def run(self, name: str, block: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        movable = self.movable(args)
        result, tape = record(function, args, kwargs, self.cost, self.where, movable)
        inputs = tensors_in((args, kwargs))
        new = [tensor for tensor in inputs if tensor.untyped_storage()._cdata not in self.inputs]
        tape.input_bytes = storage_bytes(new)
        self.inputs |= {t.untyped_storage()._cdata: StorageWeakRef(t.untyped_storage()) for t in inputs}
        kind = (type(block), *(_likeness(p) for p in block.parameters()), *map(_likeness, tree_leaves((args, kwargs))))
        kind += (movable is None, *tape.operations, *tape.saved_tensors)
        if kind not in self.known:
            self.known[kind] = self.block_memory(block, function, args, kwargs, tape)
        self.tapes.append(tape)
        self.names.append(name)
        self.memories.append(self.known[kind])
        self.moved.append(StorageWeakRef(movable.untyped_storage()) if movable is not None else None)
        self.outputs = tensors_in(result)
        return result

    def block_memory(
        self, block: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict, tape: OpTrace
    ) -> BlockMemory:
        stage, temporary = counted_stage(block, function, args, kwargs), temporary_bytes(function, args, kwargs)
        if stage is not None:  # it also counts the temporary gradients of parameters
            gradients = storage_bytes(tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad)
            temporary = max(temporary, stage.output + stage.returning + gradients)
        intervals = peak_intervals(block, function, args, kwargs, tape) if self.streams else []
        return BlockMemory(temporary, stage, intervals)

    def movable(self, args: tuple) -> Tensor | None:
        """Return the hidden states of a call if they are the previous output, or existed before all calls."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.grad_fn is None:
            return None
        return first if not self.tapes or any(first is output for output in self.outputs) else None

    def settle(self) -> None:
        """Mark inputs as not movable if another object still references them after the forward pass."""
        self.outputs = []
        for tape, reference in zip(self.tapes, self.moved, strict=True):
            if reference is not None and not reference.expired():
                tape.movable_input = 0
                tape.saved_tensors = [
                    each if each.owner != INPUT else each._replace(owner=None) for each in tape.saved_tensors
                ]


@contextmanager
def dry_run(model: nn.Module, cost: Cost, streams: bool = False) -> Iterator[DryRun]:
    """Record the model's forward pass inside the `with` block. Operation traces that are already open pause."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with untraced(), preserved_draws(model.parameters()), track_running_module(model) as where:
        yield DryRun(cost, where, streams=streams)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def temporary_bytes(function: Callable[..., Any], args: tuple, kwargs: dict) -> int:
    """Return the peak bytes of a function's forward and backward pass, in addition to its saved tensors."""
    args, kwargs = tree_map(_leaf, (args, kwargs))
    leaves = tensors_in((args, kwargs))
    with StepTrace(*leaves) as live:
        results = [value for value in tensors_in(function(*args, **kwargs)) if value.requires_grad]
        saved = live.now
        inputs = [value for value in leaves if value.requires_grad]
        if inputs and results:
            torch.autograd.grad(results, inputs, [torch.ones_like(value) for value in results], allow_unused=True)
    return live.peak - saved


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _likeness(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype, value.requires_grad
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value)
