"""Data as a pure function of (seed, step).

A `BatchSource` answers `at(step)` with the same examples whatever was asked before and however many ranks, workers or
micro-batches there are. A position in a pure function is all that resuming needs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from thrifty.core.errors import RefusedError


@dataclass(frozen=True)
class Batch:
    """Examples in rows. Every tensor of `fields` has b rows; `weight` (b,) sums to 1 over the effective batch.

    The weights are fixed once, for the effective batch. Whoever splits it (ranks, micro-batches) or draws from it
    (sampling) only selects and multiplies, and gradients are only ever summed: no mean of means anywhere.
    """

    fields: Mapping[str, Tensor]
    weight: Tensor
    last: bool = True
    """Whether the gradients are complete once these rows have been through the backward pass: False for a micro-batch
    that others of the same sum follow."""

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
        """The examples at these indices (n,), repeats allowed."""
        return self.map(lambda tensor: tensor[rows])

    def pin_memory(self) -> "Batch":
        return self.map(Tensor.pin_memory)

    def to(self, device: torch.device | str) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def weighted(self, weight: Tensor) -> "Batch":
        return replace(self, weight=weight)


@dataclass(frozen=True)
class ExampleIndex:
    """The examples that a source goes through in an epoch, by number and in no order of training."""

    count: int
    fingerprint: str
    """A hash of what they are: other examples, and these cut into other pieces, have another."""
    labels: Tensor | None = None
    """The number of each one's class (n,), where examples have one."""
    label_names: tuple[str, ...] = ()
    """The classes by number, where they have names."""


@dataclass(frozen=True)
class ExampleSubset:
    """Which examples of a source are gone through."""

    kept: Tensor
    """Their numbers in the whole source, int64 (k,), ascending."""
    scores: Tensor | None = None
    """Of all its examples (n,), what they were chosen by: higher is harder."""


class BatchSource:
    """The effective batch of every step. Subclasses give `rows`; the rest follows."""

    batch: int = 0
    """Examples in the effective batch, over all ranks and micro-batches; the largest one where it varies. 0 where there
    are no data, as when a finished model is restored."""
    examples: int | None = None
    """Examples in one epoch; None where there are no epochs, as of a stream."""
    notices: tuple[str, ...] = ()
    """Sentences about how examples are read, for a run's records."""
    unrepeatable: str = ""
    """Why a resumed run is not given what the run that was not stopped was given; empty where it is."""

    @property
    def in_thread(self) -> bool:
        """True if batches may be computed in another thread while a step is made."""
        return True

    @property
    def loading(self) -> Mapping[str, Any]:
        """Settings of a torch DataLoader by which processes read batches ahead; empty without processes."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return plain values by which a resumed run continues reading, where that is not a function of the step."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was returned."""

    @property
    def unit(self) -> int:
        """What the size of every step's effective batch is a multiple of."""
        return self.batch

    def size(self, step: int) -> int:
        """Examples in the effective batch of this step."""
        return self.batch

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows start … stop-1 of the step's effective batch; nothing else need be read."""
        raise NotImplementedError

    def amount(self, step: int) -> float:
        """Return the weight of this step's effective batch relative to other steps; weights inside a step sum to 1."""
        return 1.0

    def at(self, step: int) -> Batch:
        return self.rows(step, 0, self.size(step))

    def with_batch_size(self, sizes: Sequence[int]) -> "BatchSource":
        """The same examples in the same order, in effective batches of other sizes: those of the first steps, the last
        of which holds for all later ones."""
        return ResizedSource(self, sizes)

    def example_index(self) -> ExampleIndex:
        """Raises RefusedError where examples have no numbers to be known by."""
        raise _numberless(self)

    def subset(self, choice: ExampleSubset) -> "BatchSource":
        """The same kind of source with these of its examples; all else, such as the seed, stays. Raises RefusedError
        where examples have no numbers, or fewer are left than one effective batch."""
        raise _numberless(self)

    @property
    def selected_subset(self) -> ExampleSubset | None:
        """Which of its examples it goes through, where not all."""
        return None


def _numberless(source: BatchSource) -> RefusedError:
    what = f"the examples of this data ({type(source).__name__}) have no fixed numbers to be known by"
    return RefusedError(what, "train on all of them")


def _stretch(source: BatchSource, first: int, stop: int) -> Batch:
    """Examples first … stop-1 of all that a source gives, in its order; its effective batches are of one size."""
    size = source.batch
    steps = range(first // size, -(-stop // size))
    parts = [source.rows(step, max(first - step * size, 0), min(stop - step * size, size)) for step in steps]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0].fields}
    return Batch(joined, torch.cat([part.weight for part in parts]))


class WrappedSource(BatchSource):
    """Another source with something done to what it gives; its examples are that one's."""

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
    """Another source with a pure function of (step, batch) applied to what it gives."""

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
    """The rows of one rank: an equal, contiguous part of the effective batch. Raises RefusedError where there is
    none."""

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
    what = f"cannot be shared equally by {ranks} ranks"
    if source.batch % ranks:
        fix = f"--set data.batch={-(-source.batch // ranks) * ranks}"
        raise RefusedError(f"an effective batch of {source.batch} examples {what}", fix)
    fix = f"let all sizes be multiples of {math.lcm(source.unit, ranks)}"
    raise RefusedError(f"effective batches in multiples of {source.unit} examples {what}", fix)


class OversampledSource(WrappedSource):
    """`times` consecutive effective batches as one, for techniques that choose among more than they train on."""

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
    """Another source's examples in its own order, none skipped and none repeated, in batches of varying size."""

    def __init__(self, source: BatchSource, sizes: Sequence[int]):
        self.source, self.sizes, self.batch = source, sizes, max(sizes)
        self.firsts = [0, *accumulate(sizes[:-1])]

    @property
    def unit(self) -> int:
        return math.gcd(*self.sizes)

    def size(self, step: int) -> int:
        return self.sizes[min(step, len(self.sizes) - 1)]

    def first(self, step: int) -> int:
        """How many examples the steps before this one have."""
        last = len(self.sizes) - 1
        return self.firsts[min(step, last)] + max(step - last, 0) * self.sizes[last]

    def rows(self, step: int, start: int, stop: int) -> Batch:
        first = self.first(step)
        batch = _stretch(self.source, first + start, first + stop)
        return batch.weighted(batch.weight * (self.source.batch / self.size(step)))

    def with_batch_size(self, sizes: Sequence[int]) -> BatchSource:
        return self.source.with_batch_size(sizes)
