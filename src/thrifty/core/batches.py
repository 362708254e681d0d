"""Data as a pure function of (seed, step).

A `BatchSource` answers `at(step)` with the same examples whatever was asked before and however many ranks, workers or
micro-batches there are. A position in a pure function is all that resuming needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Examples in rows. Every tensor of `fields` has b rows; `weight` (b,) sums to 1 over the effective batch.

    The weights are fixed once, for the effective batch. Whoever splits it (ranks, micro-batches) or draws from it
    (sampling) only selects and multiplies, and gradients are only ever summed: no mean of means anywhere.
    """

    fields: Mapping[str, Tensor]
    weight: Tensor

    def __getitem__(self, field: str) -> Tensor:
        return self.fields[field]

    def __len__(self) -> int:
        return self.weight.shape[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch({name: function(tensor) for name, tensor in self.fields.items()}, function(self.weight))

    def rows(self, start: int, stop: int) -> "Batch":
        return self.map(lambda tensor: tensor[start:stop])

    def take(self, rows: Tensor) -> "Batch":
        """The examples at these indices (n,), repeats allowed."""
        return self.map(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def weighted(self, weight: Tensor) -> "Batch":
        return replace(self, weight=weight)


class BatchSource:
    """The effective batch of every step. Subclasses give `rows`; the rest follows."""

    batch: int
    """Examples in the effective batch, over all ranks and micro-batches; the largest one where it varies."""

    def size(self, step: int) -> int:
        """Examples in the effective batch of this step."""
        return self.batch

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows start … stop-1 of the step's effective batch; nothing else need be read."""
        raise NotImplementedError

    def at(self, step: int) -> Batch:
        return self.rows(step, 0, self.size(step))


class Mapped(BatchSource):
    """Another source with a pure function of (step, batch) applied to what it gives."""

    def __init__(self, source: BatchSource, function: Callable[[int, Batch], Batch]):
        self.source, self.function, self.batch = source, function, source.batch

    def size(self, step: int) -> int:
        return self.source.size(step)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.function(step, self.source.rows(step, start, stop))


class Share(BatchSource):
    """The rows of one rank: an equal, contiguous part of the effective batch."""

    def __init__(self, source: BatchSource, rank: int, ranks: int):
        self.source, self.rank, self.ranks, self.batch = source, rank, ranks, source.batch // ranks

    def size(self, step: int) -> int:
        return self.source.size(step) // self.ranks

    def rows(self, step: int, start: int, stop: int) -> Batch:
        first = self.rank * self.size(step)
        return self.source.rows(step, first + start, first + stop)


class Presampled(BatchSource):
    """`times` consecutive effective batches as one, for techniques that choose among more than they train on."""

    def __init__(self, source: BatchSource, times: int):
        self.source, self.times, self.batch = source, times, source.batch * times

    def rows(self, step: int, start: int, stop: int) -> Batch:
        size = self.source.batch
        parts = []
        for index in range(self.times):
            low, high = max(start - index * size, 0), min(stop - index * size, size)
            if low < high:
                parts.append(self.source.rows(step * self.times + index, low, high))
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0].fields}
        return Batch(joined, torch.cat([part.weight for part in parts]) / self.times)
