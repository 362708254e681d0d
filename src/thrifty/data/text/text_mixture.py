"""Mixtures of several text sources, each with a fraction of the examples."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import UsageError
from thrifty.data.epoch_sampler import HELD_OUT_KEY, EpochSource, HeldOutByKey, IndexedExamples
from thrifty.kernels.keyed_permutation import permute

PERIOD = 1000
"""Number of consecutive examples that contain the exact fraction of every source, rounded to whole examples."""


def example_counts(weights: Mapping[str, float], period: int = PERIOD) -> list[int]:
    """Return how many of `period` examples come from each source, by its weight.

    Raises UsageError for weights that are not positive, or too small for one example.
    """
    for name, weight in weights.items():
        if not 0 < weight < float("inf"):
            raise UsageError(f"data.sources: the weight of {name!r} is {weight}", fix="set the weight above 0")
    exact = np.array(list(weights.values())) / sum(weights.values()) * period
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: period - counts.sum()]] += 1
    if not counts.all():
        name = list(weights)[int(counts.argmin())]
        raise UsageError(
            f"data.sources: the weight of {name!r} gives less than one example per {period} examples",
            fix=f"raise the weight; or leave {name!r} out",
        )
    return counts.tolist()


class MixedSource(BatchSource):
    """Training examples of several sources, each in its own epochs.

    In each group of `PERIOD` examples, a seeded permutation selects the source of each example. Sources therefore
    depend only on seed and step.
    """

    def __init__(self, sources: Sequence[EpochSource], counts: Sequence[int], batch: int, seed: int):
        self.sources, self.batch, self.seed = sources, batch, seed
        self.bounds = np.cumsum([0, *counts])

    def rows(self, step: int, start: int, stop: int) -> Batch:
        which, numbers = self.places(step * self.batch + np.arange(start, stop))
        fields = _gathered(which, lambda source, here: self.sources[source].numbered(numbers[here]))
        return Batch(fields, torch.full((stop - start,), 1 / self.batch))

    def places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays (b,) for examples of the run: the source, and the example number within the source."""
        cycles, positions = np.divmod(numbers, PERIOD)
        slots = np.empty_like(positions)
        for cycle in np.unique(cycles):
            in_cycle = cycles == cycle
            slots[in_cycle] = permute(positions[in_cycle], PERIOD, self.seed, int(cycle))
        which = np.searchsorted(self.bounds, slots, side="right") - 1
        return which, cycles * np.diff(self.bounds)[which] + slots - self.bounds[which]


class MixedExamples:
    """Held-out examples of several sources in the fractions of the mixture.

    The source that is smallest relative to its fraction limits their number.
    """

    def __init__(self, parts: Sequence[IndexedExamples], counts: Sequence[int]):
        total = min(len(part) * sum(counts) // count for part, count in zip(parts, counts, strict=True))
        self.parts = parts
        sizes = [max(1, total * count // sum(counts)) for count in counts]
        self.which = np.repeat(np.arange(len(parts)), sizes)
        self.numbers = np.concatenate(
            [permute(np.arange(size), len(part), HELD_OUT_KEY) for part, size in zip(parts, sizes, strict=True)]
        )

    def __len__(self) -> int:
        return len(self.which)

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        which, numbers = self.which[indices], self.numbers[indices]
        return _gathered(which, lambda part, here: self.parts[part].fields(numbers[here]))


def mixed_held_out(parts: Sequence[IndexedExamples], counts: Sequence[int]) -> HeldOutByKey:
    return HeldOutByKey(MixedExamples(parts, counts))


def _gathered(which: np.ndarray, fields_of: Any) -> dict[str, Tensor]:
    """Return rows in the order of the source numbers `which`. `fields_of` returns the rows of one source."""
    gathered: dict[str, Tensor] = {}
    for source in np.unique(which):
        here = which == source
        for name, rows in fields_of(int(source), here).items():
            if name not in gathered:
                gathered[name] = rows.new_empty((len(which), *rows.shape[1:]))
            gathered[name][torch.from_numpy(here)] = rows
    return gathered
