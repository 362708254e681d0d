"""Sampling of training examples in epochs, as a pure function of (seed, step)."""

import hashlib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import Batch, BatchSource, ExampleIndex, ExampleSubset
from thrifty.core.errors import RefusedError
from thrifty.kernels.example_rng import example_keys
from thrifty.kernels.keyed_permutation import permute

HELD_OUT_KEY = 0x48454C44
"""Key that selects held-out examples, the same for every seed, so that runs can be compared."""
HASHED_AT_ONCE = 1 << 22
"""Number of array elements that are hashed at once."""


class IndexedExamples(Protocol):
    """Examples with random access."""

    def __len__(self) -> int: ...

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return the examples at `indices` (b,). Each field has b rows."""


@runtime_checkable
class NumberedExamples(Protocol):
    """Examples with fixed numbers, so that a subset can be selected."""

    def example_index(self) -> ExampleIndex: ...


def fingerprint(*arrays: np.ndarray, also: object = "") -> str:
    """Return a hash of arrays and of the value `also`. Arrays may be memory-mapped."""
    digest = hashlib.sha256(repr((also, [(array.dtype.str, array.shape) for array in arrays])).encode())
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, len(flat), HASHED_AT_ONCE):
            digest.update(np.ascontiguousarray(flat[start : start + HASHED_AT_ONCE]).data)
    return digest.hexdigest()


class EpochSource(BatchSource):
    """Training examples in epochs, each example with weight 1 / batch.

    Every epoch reads all examples once, in a new order if `is_shuffled`. A batch may span two epochs.
    """

    def __init__(self, contents: IndexedExamples, batch: int, seed: int):
        self.contents, self.batch, self.seed = contents, batch, seed
        self._subset: ExampleSubset | None = None
        self.is_shuffled = True

    @property
    def examples(self) -> int:
        """Number of examples in one epoch."""
        return len(self.contents) if self._subset is None else len(self._subset.kept)

    @property
    def selected_subset(self) -> ExampleSubset | None:
        return self._subset

    def subset(self, choice: ExampleSubset) -> Self:
        self.example_index()
        if len(choice.kept) < self.batch:
            raise RefusedError(
                f"{len(choice.kept)} examples are left to train on, fewer than one effective batch of {self.batch}",
                fix=f"keep more examples; or --set data.batch={max(len(choice.kept), 1)}",
            )
        changed = copy(self)
        changed._subset = ExampleSubset(torch.from_numpy(self.places(choice.kept.numpy())), choice.scores)
        return changed

    def example_index(self) -> ExampleIndex:
        if not isinstance(self.contents, NumberedExamples):
            return super().example_index()
        whole = self.contents.example_index()
        if self._subset is None:
            return whole
        kept = self._subset.kept
        labels = None if whole.labels is None else whole.labels[kept]
        return replace(
            whole, count=len(kept), fingerprint=fingerprint(kept.numpy(), also=whole.fingerprint), labels=labels
        )

    def places(self, numbers: np.ndarray) -> np.ndarray:
        """Return the indices in `contents` for example numbers (b,) from 0 to `examples` - 1."""
        return numbers if self._subset is None else self._subset.kept.numpy()[numbers]

    def sequential_batches(self, batch: int) -> Iterator[Batch]:
        """Yield every example once, in order and without augmentation, in batches of at most `batch`.

        The weights of all examples sum to 1.
        """
        for start in range(0, self.examples, batch):
            part = self.places(np.arange(start, min(start + batch, self.examples)))
            yield Batch(self.eval_fields(part), torch.full((len(part),), 1 / self.examples))

    def eval_fields(self, chosen: np.ndarray) -> dict[str, Tensor]:
        """Return the examples at indices `chosen` (b,) without augmentation."""
        return self.contents.fields(chosen)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        fields = self.numbered(step * self.batch + np.arange(start, stop))
        return Batch(fields, torch.full((stop - start,), 1 / self.batch))

    def numbered(self, numbers: np.ndarray) -> dict[str, Tensor]:
        """Return the examples with `numbers` (b,). Numbers count examples from the start of the run."""
        epochs, positions = numbers // self.examples, numbers % self.examples
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            ordered = positions[in_epoch]
            chosen[in_epoch] = permute(ordered, self.examples, self.seed, int(epoch)) if self.is_shuffled else ordered
        return self.fields(self.places(chosen), numbers)

    def fields(self, chosen: np.ndarray, numbers: np.ndarray) -> dict[str, Tensor]:
        """Return the examples at indices `chosen` (b,). `numbers` (b,) count examples from the start of the run."""
        return self.contents.fields(chosen)


class EpochsByKey(EpochSource):
    """Training examples in epochs, each with a random seed in the field "key", int64 (b,).

    An example has a new key in each epoch, and a fixed key in evaluation.
    """

    def fields(self, chosen: np.ndarray, numbers: np.ndarray) -> dict[str, Tensor]:
        keys = example_keys(self.seed, numbers)
        return {**self.keyed_fields(chosen, keys.view(np.uint64)), "key": torch.from_numpy(keys)}

    def keyed_fields(self, chosen: np.ndarray, keys: np.ndarray) -> dict[str, Tensor]:
        """Return the examples at indices `chosen` (b,), with random changes seeded by `keys`, uint64 (b,)."""
        return self.contents.fields(chosen)

    def eval_fields(self, chosen: np.ndarray) -> dict[str, Tensor]:
        return add_held_out_keys(super().eval_fields(chosen), chosen)


class HeldOutExamples:
    """Examples for evaluation, the same for every seed.

    An evaluation of n examples uses the first n examples of any longer evaluation.
    """

    def __init__(self, contents: IndexedExamples):
        self.contents = contents
        self.shape: Callable[[Batch], Batch] = lambda batch: batch

    def __len__(self) -> int:
        return len(self.contents)

    def shaped(self, shape: Callable[[Batch], Batch]) -> Self:
        """Return a copy that applies the function `shape` to each batch."""
        changed = copy(self)
        changed.shape = shape
        return changed

    def batches(self, examples: int, batch: int) -> Iterator[Batch]:
        """Yield the first `examples` examples (or all, if there are fewer) in batches of at most `batch`.

        The weights of all examples sum to 1. The sum of weighted losses is therefore the mean loss.
        """
        total = min(examples, len(self))
        chosen = permute(np.arange(total), len(self), HELD_OUT_KEY)
        for start in range(0, total, batch):
            part = chosen[start : start + batch]
            yield self.shape(Batch(self.fields(part), torch.full((len(part),), 1 / total)))

    def fields(self, chosen: np.ndarray) -> dict[str, Tensor]:
        return self.contents.fields(chosen)


class HeldOutByKey(HeldOutExamples):
    """Examples for evaluation, with a fixed "key" int64 (b,) that seeds random values."""

    def fields(self, chosen: np.ndarray) -> dict[str, Tensor]:
        return add_held_out_keys(super().fields(chosen), chosen)


def add_held_out_keys(fields: dict[str, Tensor], chosen: np.ndarray) -> dict[str, Tensor]:
    """Add the held-out keys of the examples at indices `chosen` (b,) to `fields`."""
    return {**fields, "key": torch.from_numpy(example_keys(HELD_OUT_KEY, chosen))}
