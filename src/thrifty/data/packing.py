"""Examples cut from a stream of tokens: windows of equal length, ordered by a pure function of (seed, step)."""

from collections.abc import Iterator

import numpy as np
import torch

from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import UsageError
from thrifty.data.permutation import permuted

HELD_OUT_KEY = 0x48454C44
"""Held-out examples are the same for every seed, so that runs can be compared."""


class Windows:
    """A stream of tokens (any unsigned type, memory-mapped or not) as examples of `length` + 1 tokens each.

    One window begins where the last token of the one before it lies, so that every token but the first is predicted
    once. What is left at the end and fills no window is not used.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def at(self, indices: np.ndarray) -> torch.Tensor:
        """The windows of these numbers (b,) as int64 (b, length + 1)."""
        places = indices[:, None] * self.length + np.arange(self.length + 1)
        return torch.from_numpy(self.tokens[places].astype(np.int64))


class PackedTokens(BatchSource):
    """Training examples: {"tokens": int64 (b, length + 1)}, each of weight 1 / batch.

    Every epoch goes through all windows once, in its own order; a batch may reach across the border of two epochs.
    Raises UsageError where the text has fewer windows than one batch.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch: int, seed: int):
        self.windows, self.batch, self.seed = Windows(tokens, length), batch, seed
        if len(self.windows) < batch:
            raise UsageError(
                f"the training text has {len(tokens):,} tokens: {len(self.windows)} examples of length {length}, "
                f"fewer than one batch of {batch}",
                fix=_smaller(len(tokens), len(self.windows), batch),
            )

    @property
    def examples(self) -> int:
        """Examples in one epoch."""
        return len(self.windows)

    def rows(self, step: int, start: int, stop: int) -> Batch:
        count = step * self.batch + np.arange(start, stop)
        epochs, positions = count // self.examples, count % self.examples
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = permuted(positions[here], self.examples, self.seed, int(epoch))
        weight = torch.full((stop - start,), 1 / self.batch)
        return Batch({"tokens": self.windows.at(chosen)}, weight)


class HeldOut:
    """Examples for evaluation: the same for every seed, and the first of few are the first of many.

    Raises UsageError where the held-out text does not fill one example.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        self.windows = Windows(tokens, length)
        if len(self.windows) == 0:
            raise UsageError(
                f"the held-out text has {len(tokens):,} tokens, fewer than one example of length {length}",
                fix="raise data.held_out, or lower data.length",
            )

    def __len__(self) -> int:
        return len(self.windows)

    def batches(self, examples: int, batch: int) -> Iterator[Batch]:
        """The first `examples` windows (all, if there are fewer) in batches of at most `batch`.

        The weights sum to 1 over all of them together, so that weighted losses add up to the mean.
        """
        total = min(examples, len(self))
        chosen = permuted(np.arange(total), len(self), HELD_OUT_KEY)
        for start in range(0, total, batch):
            part = chosen[start : start + batch]
            yield Batch({"tokens": self.windows.at(part)}, torch.full((len(part),), 1 / total))


def _smaller(tokens: int, windows: int, batch: int) -> str:
    shorter = f"data.length to at most {(tokens - 1) // batch}" if tokens > batch else ""
    fewer = f"data.batch to at most {windows}" if windows else ""
    either = " or ".join(choice for choice in (fewer, shorter) if choice)
    return f"lower {either}" if either else "give more text"
