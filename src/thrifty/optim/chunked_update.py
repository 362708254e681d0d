"""Chunked optimizer updates: run a transform chain on chunks of the parameters, so that intermediate results stay in
the CPU cache.

A chain is a sequence of update elements, such as clipping, Adam and weight decay. A chain over all parameters reads and
writes main memory once per element, with temporaries as large as the model. Elements whose scope is a row can run on
chunks of about a megabyte instead, one chunk per thread. The arithmetic is the same, the update is two to three times
faster, and temporaries have the size of a few chunks. If an element requires a whole parameter, that parameter is one
chunk. The elements before and after this element still process the parameter in rows. Devices other than the CPU use
larger chunks, because each kernel launch costs more there.
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
"""Index of a parameter, and the rows of the parameter in a chunk; None for all rows."""


class UpdateExecutor(Protocol):
    """Executor of an optimizer update. The result is added to the parameters, or overwrites the gradients."""

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None: ...


@dataclass(frozen=True)
class WholeUpdate:
    """Chain that runs on all its tensors at once. The result is added to the parameters. If `factors` is None, the
    result overwrites the updates instead.
    """

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
    """Segments of a chain that run one after the other. All elements of a segment have the same scope."""

    segments: tuple["ChunkedUpdate", ...]

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        for segment in self.segments:
            segment.run(iter(segment.pieces), updates, slots, parameters, numbers)


@dataclass(frozen=True)
class UpdateChunk:
    spans: tuple[Span, ...]
    work: UpdateExecutor

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[i] if rows is None or not len(tensors[i]) else tensors[i][rows] for i, rows in self.spans]


class ChunkedUpdate:
    """Chain that runs on chunks that are as small as the scopes of its elements allow.

    The result times `factors` is added to the parameters. If `factors` is None, the result overwrites the gradients.
    """

    def __init__(self, chain: TransformChain, factors: TransformChain | None, parameters: Sequence[Tensor]):
        self.keys = tuple(f"{key}." for key in chain.elements)
        self.local = chain.reach is TransformScope.ROWS
        here = local_tensors(parameters) if self.local else list(parameters)
        on_cpu = all(tensor.device.type == "cpu" for tensor in here)
        self.pieces = []
        for spans in _spans(here, self.local, CHUNK_ELEMENTS if on_cpu else GPU_CHUNK_ELEMENTS):
            own = [i for i, _ in spans]
            self.pieces.append(UpdateChunk(tuple(spans), _executor(chain.subset(own), factors, [here[i] for i in own])))
        # all ranks must start the collectives of sharded tensors in the same order
        sharded = not self.local and any(is_dtensor(tensor) for tensor in here)
        self.threads = torch.get_num_threads() if on_cpu and not sharded else 1

    def apply(self, updates: list[Tensor], slots: Slots, parameters: list[Tensor], numbers: Scalars) -> None:
        queue = iter(self.pieces)
        if self.threads == 1 or len(self.pieces) == 1:
            self.run(queue, updates, slots, parameters, numbers)
            return
        # a thread that finishes a chunk takes the next from the queue
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


def _executor(chain: TransformChain, factors: TransformChain | None, tensors: Sequence[Tensor]) -> UpdateExecutor:
    by_reach = groupby(chain.elements, lambda key: chain.elements[key].reach is TransformScope.ROWS)
    segments = [chain.part(list(keys)) for _, keys in by_reach]
    if len(segments) < 2:
        return WholeUpdate(chain, factors)
    *before, last = segments
    return SequentialUpdate(
        (*(ChunkedUpdate(part, None, tensors) for part in before), ChunkedUpdate(last, factors, tensors))
    )


def row_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return views of consecutive rows of a matrix (rows, columns). Each view has the size of a chunk.

    Elements that require whole parameters, but can process them in rows, call this function. A DTensor, a tensor on a
    GPU, or a tensor no larger than a chunk is returned as one view.
    """
    if is_dtensor(tensor) or tensor.device.type != "cpu" or tensor.numel() <= CHUNK_ELEMENTS:
        return (tensor,)
    return tensor.split(_rows(tensor, CHUNK_ELEMENTS))


def _rows(tensor: Tensor, elements: int) -> int:
    """Return the number of rows per part, for equal parts of a tensor with about `elements` or more elements."""
    return -(-len(tensor) // max(tensor.numel() // elements, 1))


def chunks_like(parts: Sequence[Tensor], tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor (r, …) into parts with the same numbers of rows as `parts`."""
    return tensor.split([len(part) for part in parts]) if len(parts) > 1 else (tensor,)


def product(factors: TransformChain, numbers: Scalars) -> float:
    """Return the product of all factors of a chain of `ScaleBySchedule`."""
    return math.prod(float(numbers[f"{key}.factor"]) for key in factors.elements)


def _spans(tensors: Sequence[Tensor], by_rows: bool, elements: int) -> Iterator[list[Span]]:
    """Yield groups of about `elements` elements: small tensors together, large tensors split by rows if `by_rows`."""
    group: list[Span] = []
    filled = 0
    for index, tensor in enumerate(tensors):
        count = tensor.numel()
        if not count:
            continue
        rows = _rows(tensor, elements) if by_rows and tensor.ndim else 0
        cuts = range(0, len(tensor), rows) if rows and rows < len(tensor) else [0]
        for start in cuts:
            group.append((index, slice(start, start + rows) if len(cuts) > 1 else None))
            filled += count // len(cuts)
            if filled >= elements:
                yield group
                group, filled = [], 0
    if group:
        yield group


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a thread pool. Each thread computes with one torch thread."""
    here, all_there = torch.get_num_threads(), Barrier(threads + 1)

    def alone() -> None:
        torch.set_num_threads(1)
        all_there.wait()

    pool = ThreadPoolExecutor(threads, "thrifty-update", initializer=alone)
    for _ in range(threads):
        pool.submit(int)
    all_there.wait()
    # torch.set_num_threads in a thread also changes the default for later threads
    torch.set_num_threads(here)
    return pool
