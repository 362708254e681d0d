"""A forward pass to learn from: the tapes of its blocks, and what a block's backward pass needs beside them.

Nothing of it stays: buffers and random numbers are as they were, and no gradient is left behind.
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
    """What a call of a block holds beside its tape."""

    temporary: int
    """Bytes that its passes need at their peak beside what is saved."""
    stage: ChainStageCost | None
    """The call as part of a chain, counted; None where shapes alone do not tell."""
    moments: Sequence[PeakInterval]


@dataclass
class DryRun:
    """Collects the tapes of blocks in the order in which they are called."""

    cost: Cost
    where: Where
    tapes: list[OpTrace] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    held: list[BlockMemory] = field(default_factory=list)
    """What each call holds beside that."""
    streams: bool = False
    """Whether it is to be known what calls hold whose saved tensors wait elsewhere."""
    known: dict[Any, BlockMemory] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    """Of the call before."""
    moved: list[StorageWeakRef | None] = field(default_factory=list)
    """For each call what of its input may wait elsewhere."""
    inputs: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages that calls were given; weak references also keep addresses from being used again."""

    def run(self, name: str, block: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        movable = self.movable(args)
        result, tape = record(function, args, kwargs, self.cost, self.where, movable)
        inputs = tensors_in((args, kwargs))
        new = [tensor for tensor in inputs if tensor.untyped_storage()._cdata not in self.inputs]
        tape.input_bytes = storage_bytes(new)
        self.inputs |= {t.untyped_storage()._cdata: StorageWeakRef(t.untyped_storage()) for t in inputs}
        kind = (type(block), *(_likeness(p) for p in block.parameters()), *map(_likeness, tree_leaves((args, kwargs))))
        kind += (movable is None, *tape.operations, *tape.handed)
        if kind not in self.known:
            self.known[kind] = self.held_by(block, function, args, kwargs, tape)
        self.tapes.append(tape)
        self.names.append(name)
        self.held.append(self.known[kind])
        self.moved.append(StorageWeakRef(movable.untyped_storage()) if movable is not None else None)
        self.outputs = tensors_in(result)
        return result

    def held_by(
        self, block: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict, tape: OpTrace
    ) -> BlockMemory:
        stage, temporary = counted_stage(block, function, args, kwargs), temporary_bytes(function, args, kwargs)
        if stage is not None:  # which has counted gradients of parameters too, while they are on their way
            of_inputs = storage_bytes(tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad)
            temporary = max(temporary, stage.output + stage.returning + of_inputs)
        moments = peak_intervals(block, function, args, kwargs, tape) if self.streams else []
        return BlockMemory(temporary, stage, moments)

    def movable(self, args: tuple) -> Tensor | None:
        """The hidden states of a call, if they are made for it alone: by the call before, or before all calls."""
        first = args[0] if args else None
        if not isinstance(first, Tensor) or first.grad_fn is None:
            return None
        return first if not self.tapes or any(first is output for output in self.outputs) else None

    def settle(self) -> None:
        """After the forward pass: an input that somebody still holds gains nothing by being moved."""
        self.outputs = []
        for tape, reference in zip(self.tapes, self.moved, strict=True):
            if reference is not None and not reference.expired():
                tape.movable_input = 0
                tape.handed = [each if each.owner != INPUT else each._replace(owner=None) for each in tape.handed]


@contextmanager
def dry_run(model: nn.Module, cost: Cost, streams: bool = False) -> Iterator[DryRun]:
    """Run the model forward inside the block; whatever else follows operations does not see it."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with untraced(), preserved_draws(model.parameters()), track_running_module(model) as where:
        yield DryRun(cost, where, streams=streams)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def temporary_bytes(function: Callable[..., Any], args: tuple, kwargs: dict) -> int:
    """What a function's forward and backward pass, down to its inputs, hold at the peak beside what it saves."""
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
