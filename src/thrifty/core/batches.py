"""Data as a pure function of (seed, step).

`BatchSource.at(step)` returns the same examples after any earlier reads, and for any number of ranks, workers or
micro-batches. A run can therefore resume from the step number alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from thrifty.core.errors import RefusedError


@dataclass(frozen=True)
class Batch:
    """Batch of b examples. Every tensor of `fields` has b rows. The weights (b,) sum to 1 over the effective batch.
    They are set once, for the effective batch. Ranks and micro-batches only select rows, and sampling multiplies
    weights. Gradients are only added, so no mean of means occurs."""

    fields: Mapping[str, Tensor]
    weight: Tensor
    last: bool = True
    """True if this batch's backward pass completes the step's gradients, as for the last micro-batch."""

    def __getitem__(self, field: str) -> Tensor:
        return self.fields[field]

    def __len__(self) -> int:
        return self.weight.shape[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        fields = {name: function(tensor) for name, tensor in self.fields.items()}
        return replace(self, fields=fields, weight=function(self.weight))

    def rows(self, start: int, stop: int) -> "Batch":
        return self.map(lambda tensor: tensor[start:stop])

    def take(self, rows: Tensor) -> "Batch":
        """Return the examples at these indices (n,); indices may repeat."""
        return self.map(lambda tensor: tensor[rows])

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def weighted(self, weight: Tensor) -> "Batch":
        return replace(self, weight=weight)


@dataclass(frozen=True)
class ExampleIndex:
    """Numbering of the n examples in one epoch of a source, independent of the training order."""

    count: int
    fingerprint: str
    """Hash of the examples. It changes if the examples or their boundaries change."""
    labels: Tensor | None = None
    """Class index of each example, (n,); None without classes."""
    label_names: tuple[str, ...] = ()
    """Class names by index; empty if classes have no names."""


@dataclass(frozen=True)
class ExampleSubset:
    """Subset of k of the n examples of a source."""

    kept: Tensor
    """Numbers of the selected examples in `ExampleIndex`, int64 (k,), ascending."""
    scores: Tensor | None = None
    """Selection score of every example of the source, (n,); a higher score means a harder example."""


_ANY_EXAMPLES: ContextVar[bool] = ContextVar("any examples", default=False)


@contextmanager
def any_examples() -> Iterator[None]:
    """Inside the block, a source that reads its examples in order may return the same batch for any step. Counts and
    timings of a step need the form of its batch, but not its examples."""
    token = _ANY_EXAMPLES.set(True)
    try:
        yield
    finally:
        _ANY_EXAMPLES.reset(token)


def may_be_any_examples() -> bool:
    return _ANY_EXAMPLES.get()


class BatchSource:
    """Source of the effective batch of every step. Subclasses implement `rows`."""

    batch: int = 0
    """Number of examples in the effective batch, over all ranks and micro-batches; the maximum if the number varies. 0
    without data, for example when a finished model is restored."""
    examples: int | None = None
    """Number of examples in one epoch; None for sources without epochs, such as streams."""
    notices: tuple[str, ...] = ()
    """Sentences about how examples are read, for the log of a run."""
    unrepeatable: str = ""
    """Reason why a resumed run and an uninterrupted run read different data; empty if they read the same data."""

    @property
    def in_thread(self) -> bool:
        """True if another thread may compute batches during a step."""
        return True

    @property
    def loading(self) -> Mapping[str, Any]:
        """Settings of the torch DataLoader whose worker processes prefetch batches; empty without worker processes."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the reading position as plain values, if the step does not determine it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in `state`, a result of `self.state()`."""

    @property
    def unit(self) -> int:
        """Common divisor of the effective batch sizes of all steps."""
        return self.batch

    def size(self, step: int) -> int:
        """Return the number of examples in the effective batch of `step`."""
        return self.batch

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Return rows start … stop-1 of the effective batch of `step`. The source need not read other rows."""
        raise NotImplementedError

    def amount(self, step: int) -> float:
        """Return the weight of this step's effective batch relative to other steps. Inside a step, the weights of
        examples sum to 1."""
        return 1.0

    def at(self, step: int) -> Batch:
        return self.rows(step, 0, self.size(step))

    def with_batch_size(self, sizes: Sequence[int]) -> "BatchSource":
        """Return a source with the same examples in the same order, and effective batch size `sizes[step]`. The last
        size applies to all later steps."""
        return ResizedSource(self, sizes)

    def example_index(self) -> ExampleIndex:
        """Return the numbers and labels of the examples. Raise RefusedError if examples have no fixed numbers."""
        raise _numberless(self)

    def subset(self, choice: ExampleSubset) -> "BatchSource":
        """Return the source restricted to the examples of `choice`, with the same seed and settings. Raise RefusedError
        if examples have no fixed numbers, or if fewer examples than one effective batch remain."""
        raise _numberless(self)

    @property
    def selected_subset(self) -> ExampleSubset | None:
        """Subset of the examples that the source uses; None if it uses all examples."""
        return None


def _numberless(source: BatchSource) -> RefusedError:
    what = f"examples of {type(source).__name__} have no fixed numbers, so no subset can be selected"
    return RefusedError(what, "train on all examples")


def _stretch(source: BatchSource, first: int, stop: int) -> Batch:
    """Return examples first … stop-1 in the order of a source. All effective batches of the source must have the same
    size."""
    size = source.batch
    steps = range(first // size, -(-stop // size))
    parts = [source.rows(step, max(first - step * size, 0), min(stop - step * size, size)) for step in steps]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0].fields}
    return Batch(joined, torch.cat([part.weight for part in parts]))


class WrappedSource(BatchSource):
    """Wrapper that changes the batches of another source but keeps its examples."""

    source: BatchSource

    @property
    def in_thread(self) -> bool:
        return self.source.in_thread

    @property
    def loading(self) -> Mapping[str, Any]:
        return self.source.loading

    @property
    def examples(self) -> int | None:  # type: ignore[override]
        return self.source.examples

    def amount(self, step: int) -> float:
        return self.source.amount(step)

    def example_index(self) -> ExampleIndex:
        return self.source.example_index()

    def subset(self, choice: ExampleSubset) -> Self:
        changed = copy(self)
        changed.source = self.source.subset(choice)
        return changed

    @property
    def selected_subset(self) -> ExampleSubset | None:
        return self.source.selected_subset


class MappedSource(WrappedSource):
    """Wrapper that applies a pure function of (step, batch) to another source's batches."""

    def __init__(self, source: BatchSource, function: Callable[[int, Batch], Batch]):
        self.source, self.function, self.batch = source, function, source.batch

    @property
    def unit(self) -> int:
        return self.source.unit

    def size(self, step: int) -> int:
        return self.source.size(step)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.function(step, self.source.rows(step, start, stop))

    def with_batch_size(self, sizes: Sequence[int]) -> BatchSource:
        return MappedSource(self.source.with_batch_size(sizes), self.function)


class RankShard(WrappedSource):
    """Rows of one rank: a contiguous part of the effective batch, of equal size on every rank. The constructor raises
    RefusedError if the effective batch cannot be divided equally."""

    def __init__(self, source: BatchSource, rank: int, ranks: int):
        self.source, self.rank, self.ranks, self.batch = source, rank, ranks, source.batch // ranks
        if source.unit % ranks:
            _refuse_unequal(source, ranks)

    @property
    def unit(self) -> int:
        return self.source.unit // self.ranks

    def size(self, step: int) -> int:
        return self.source.size(step) // self.ranks

    def rows(self, step: int, start: int, stop: int) -> Batch:
        first = self.rank * self.size(step)
        return self.source.rows(step, first + start, first + stop)

    def with_batch_size(self, sizes: Sequence[int]) -> BatchSource:
        return RankShard(self.source.with_batch_size(sizes), self.rank, self.ranks)


def _refuse_unequal(source: BatchSource, ranks: int) -> None:
    what = f"cannot be divided equally among {ranks} ranks"
    if source.batch % ranks:
        fix = f"--set data.batch={-(-source.batch // ranks) * ranks}"
        raise RefusedError(f"an effective batch of {source.batch} examples {what}", fix)
    fix = f"make all sizes multiples of {math.lcm(source.unit, ranks)}"
    raise RefusedError(f"effective batches in multiples of {source.unit} examples {what}", fix)


class OversampledSource(WrappedSource):
    """Source whose batches join `times` consecutive effective batches, for techniques that select examples."""

    def __init__(self, source: BatchSource, times: int):
        self.source, self.times, self.batch = source, times, source.batch * times

    def rows(self, step: int, start: int, stop: int) -> Batch:
        first = step * self.batch
        batch = _stretch(self.source, first + start, first + stop)
        amounts = torch.tensor(self._amounts(step))
        each = (amounts.sum() / amounts).repeat_interleave(self.source.batch)[start:stop]
        return batch.weighted(batch.weight / each)

    def amount(self, step: int) -> float:
        return sum(self._amounts(step))

    def _amounts(self, step: int) -> list[float]:
        return [self.source.amount(step * self.times + each) for each in range(self.times)]

    def with_batch_size(self, sizes: Sequence[int]) -> BatchSource:
        return self.source.with_batch_size([size * self.times for size in sizes])


class ResizedSource(WrappedSource):
    """Source with the examples of another source in batches of varying size. The order stays the same, and no example
    is skipped or repeated."""

    def __init__(self, source: BatchSource, sizes: Sequence[int]):
        self.source, self.sizes, self.batch = source, sizes, max(sizes)
        self.firsts = [0, *accumulate(sizes[:-1])]

    @property
    def unit(self) -> int:
        return math.gcd(*self.sizes)

    def size(self, step: int) -> int:
        return self.sizes[min(step, len(self.sizes) - 1)]

    def first(self, step: int) -> int:
        """Return the number of examples in all steps before `step`."""
        last = len(self.sizes) - 1
        return self.firsts[min(step, last)] + max(step - last, 0) * self.sizes[last]

    def rows(self, step: int, start: int, stop: int) -> Batch:
        first = self.first(step)
        batch = _stretch(self.source, first + start, first + stop)
        return batch.weighted(batch.weight * (self.source.batch / self.size(step)))

    def with_batch_size(self, sizes: Sequence[int]) -> BatchSource:
        return self.source.with_batch_size(sizes)
