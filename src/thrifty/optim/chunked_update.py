"""A transform run on a processor piece by piece, so that what one element leaves is still in the cache for the next.

Run over all parameters, every element of a chain is a pass over main memory, and its temporary results are as large as
the model. Elements that look no further than rows can be run on pieces of a megabyte instead, each by one thread:
the same arithmetic, two to three times faster, with temporaries of a few pieces. Where an element must see a whole
parameter, that parameter is a piece, and the elements before and behind it go through it in rows. On other devices,
where launching counts for more, pieces are larger.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from threading import Barrier
from typing import Protocol

import torch
from torch import Tensor

from thrifty.core.dtensors import is_dtensor
from thrifty.core.gradient_transform import Scalars, Slots, TransformChain, TransformScope, group_by_kind
from thrifty.core.shard_layout import local_tensors
from thrifty.machine.cpu_features import CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS

Span = tuple[int, slice | None]
"""A parameter's index and the rows of it that belong to a piece, None for all."""


class UpdateExecutor(Protocol):
    """Turns gradients into updates and adds them to the parameters, or leaves them in the gradients."""

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None: ...


@dataclass(frozen=True)
class WholeUpdate:
    """A chain on all its tensors together; the result is added to the parameters, or without `factors` left in the
    updates."""

    chain: TransformChain
    factors: TransformChain | None

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        changed = self.chain.update(list(updates), slots, parameters, numbers)
        if self.factors is not None:
            for some in group_by_kind(parameters):
                own, added = [parameters[i] for i in some], [changed[i] for i in some]
                torch._foreach_add_(own, added, alpha=product(self.factors, numbers))
            return
        for update, new in zip(updates, changed, strict=True):
            if new is not update:
                update.copy_(new)


@dataclass(frozen=True)
class SequentialUpdate:
    """The stretches of a chain that look equally far, one after the other."""

    stretches: tuple["ChunkedUpdate", ...]

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        for stretch in self.stretches:
            stretch.run(iter(stretch.pieces), updates, slots, parameters, numbers)


@dataclass(frozen=True)
class UpdateChunk:
    spans: tuple[Span, ...]
    work: UpdateExecutor

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[i] if rows is None or not len(tensors[i]) else tensors[i][rows] for i, rows in self.spans]


class ChunkedUpdate:
    """A chain in pieces that are as small as the reach of its elements allows. The result, times `factors`, is added
    to the parameters; without them it is left in the gradients."""

    def __init__(self, chain: TransformChain, factors: TransformChain | None, parameters: Sequence[Tensor]):
        self.keys = tuple(f"{key}." for key in chain.elements)
        self.local = chain.reach is TransformScope.ROWS
        here = local_tensors(parameters) if self.local else list(parameters)
        on_cpu = all(tensor.device.type == "cpu" for tensor in here)
        self.pieces = []
        for spans in _spans(here, self.local, CHUNK_ELEMENTS if on_cpu else GPU_CHUNK_ELEMENTS):
            own = [i for i, _ in spans]
            self.pieces.append(UpdateChunk(tuple(spans), _work(chain.subset(own), factors, [here[i] for i in own])))
        # collectives of sharded tensors must be met in one order by all ranks
        sharded = not self.local and any(is_dtensor(tensor) for tensor in here)
        self.threads = torch.get_num_threads() if on_cpu and not sharded else 1

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        queue = iter(self.pieces)
        if self.threads == 1 or len(self.pieces) == 1:
            self.run(queue, updates, slots, parameters, numbers)
            return
        # each thread takes the next piece from the queue when it is done with one
        work = (queue, updates, slots, parameters, numbers)
        runs = [_pool(self.threads, os.getpid()).submit(self.run, *work) for _ in range(self.threads)]
        for run in runs:
            run.result()

    @torch.no_grad()
    def run(
        self,
        pieces: Iterator[UpdateChunk],
        updates: list[Tensor],
        slots: Slots,
        parameters: list[Tensor],
        numbers: Scalars,
    ) -> None:
        slots = {slot: tensors for slot, tensors in slots.items() if slot.startswith(self.keys)}
        if self.local:
            updates, parameters = local_tensors(updates), local_tensors(parameters)
            slots = {slot: local_tensors(tensors) for slot, tensors in slots.items()}
        for piece in pieces:
            state = {slot: piece.of(tensors) for slot, tensors in slots.items()}
            piece.work.apply(piece.of(updates), state, piece.of(parameters), numbers)


def _work(chain: TransformChain, factors: TransformChain | None, tensors: Sequence[Tensor]) -> UpdateExecutor:
    """A chain of one reach at once, any other in stretches."""
    by_reach = groupby(chain.elements, lambda key: chain.elements[key].reach is TransformScope.ROWS)
    stretches = [chain.part(list(keys)) for _, keys in by_reach]
    if len(stretches) < 2:
        return WholeUpdate(chain, factors)
    *before, last = stretches
    return SequentialUpdate(
        (*(ChunkedUpdate(part, None, tensors) for part in before), ChunkedUpdate(last, factors, tensors))
    )


def row_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """The rows of a matrix in views of a piece's size, for an element that must see whole parameters and can go through
    them in rows itself; all in one where that would not help."""
    if is_dtensor(tensor) or tensor.device.type != "cpu" or tensor.numel() <= CHUNK_ELEMENTS:
        return (tensor,)
    return tensor.split(_rows(tensor, CHUNK_ELEMENTS))


def _rows(tensor: Tensor, numbers: int) -> int:
    """Rows in each of the equal parts, of `numbers` numbers or somewhat more, that a tensor divides into."""
    return -(-len(tensor) // max(tensor.numel() // numbers, 1))


def chunks_like(parts: Sequence[Tensor], tensor: Tensor) -> tuple[Tensor, ...]:
    """A tensor with as many rows in the same parts."""
    return tensor.split([len(part) for part in parts]) if len(parts) > 1 else (tensor,)


def product(factors: TransformChain, numbers: Scalars) -> float:
    """What a chain of `ScaleBySchedule` multiplies by."""
    return math.prod(float(numbers[f"{key}.factor"]) for key in factors.elements)


def _spans(tensors: Sequence[Tensor], by_rows: bool, numbers: int) -> Iterator[list[Span]]:
    """Groups of about `numbers` numbers: small tensors together, large ones by rows where that is allowed."""
    group: list[Span] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        count = tensor.numel()
        if not count:
            continue
        rows = _rows(tensor, numbers) if by_rows and tensor.ndim else 0
        cuts = range(0, len(tensor), rows) if rows and rows < len(tensor) else [0]
        for start in cuts:
            group.append((index, slice(start, start + rows) if len(cuts) > 1 else None))
            filled += count // len(cuts)
            if filled >= numbers:
                yield group
                group, filled = [], 0
    if group:
        yield group


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process that each compute alone: torch's own parallelism is switched off inside them."""
    here, all_there = torch.get_num_threads(), Barrier(threads + 1)

    def alone() -> None:
        torch.set_num_threads(1)
        all_there.wait()

    pool = ThreadPoolExecutor(threads, "thrifty-update", initializer=alone)
    for _ in range(threads):
        pool.submit(int)
    all_there.wait()
    # setting it in a thread also sets what threads yet to come start with
    torch.set_num_threads(here)
    return pool
