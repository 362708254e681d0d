"""Examples gone through again and again: which of them a step trains on is a pure function of (seed, step)."""

from collections.abc import Callable, Iterator
from copy import copy
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import Batch, BatchSource
from thrifty.data.permutation import permuted

HELD_OUT_KEY = 0x48454C44
"""Held-out examples are the same for every seed, so that runs can be compared."""


class Examples(Protocol):
    """A number of examples, any of which can be had by itself."""

    def __len__(self) -> int: ...

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        """The examples at these places (b,), each field with b rows."""
        ...


class Epochs(BatchSource):
    """Training examples, each of weight 1 / batch.

    Every epoch goes through all examples once, in its own order; a batch may reach across the border of two epochs.
    """

    def __init__(self, contents: Examples, batch: int, seed: int):
        self.contents, self.batch, self.seed = contents, batch, seed

    @property
    def examples(self) -> int:
        """Examples in one epoch."""
        return len(self.contents)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        numbers = step * self.batch + np.arange(start, stop)
        epochs, positions = numbers // self.examples, numbers % self.examples
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = permuted(positions[here], self.examples, self.seed, int(epoch))
        weight = torch.full((stop - start,), 1 / self.batch)
        return Batch(self.fields(chosen, numbers), weight)

    def fields(self, chosen: np.ndarray, numbers: np.ndarray) -> dict[str, Tensor]:
        """The examples at these places (b,), which are the run's examples of these numbers (b,)."""
        return self.contents.fields(chosen)


class HeldOutExamples:
    """Examples for evaluation: the same for every seed, and the first of few are the first of many."""

    def __init__(self, contents: Examples):
        self.contents = contents
        self.shape: Callable[[Batch], Batch] = lambda batch: batch

    def __len__(self) -> int:
        return len(self.contents)

    def shaped(self, shape: Callable[[Batch], Batch]) -> Self:
        """The same with something made of each batch before it is given out."""
        changed = copy(self)
        changed.shape = shape
        return changed

    def batches(self, examples: int, batch: int) -> Iterator[Batch]:
        """The first `examples` (all, if there are fewer) in batches of at most `batch`.

        The weights sum to 1 over all of them together, so that weighted losses add up to the mean.
        """
        total = min(examples, len(self))
        chosen = permuted(np.arange(total), len(self), HELD_OUT_KEY)
        for start in range(0, total, batch):
            part = chosen[start : start + batch]
            yield self.shape(Batch(self.fields(part), torch.full((len(part),), 1 / total)))

    def fields(self, chosen: np.ndarray) -> dict[str, Tensor]:
        return self.contents.fields(chosen)
