"""Examples as windows of equal length in a stream of tokens."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from thrifty.core.batches import ExampleIndex
from thrifty.core.errors import UsageError
from thrifty.data.epoch_sampler import EpochsByKey, HeldOutByKey, fingerprint


class TokenWindows:
    """A stream of tokens (any unsigned type, memory-mapped or not) as examples of `length` + 1 tokens each.

    A window begins with the last token of the previous window. Thus every token except the first is predicted once.
    Tokens at the end that do not fill a window are not used.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def at(self, indices: np.ndarray) -> Tensor:
        """Return the windows at `indices` (b,), int64 (b, length + 1)."""
        places = indices[:, None] * self.length + np.arange(self.length + 1)
        return torch.from_numpy(self.tokens[places].astype(np.int64))

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {"tokens": self.at(indices)}

    def texts(self, indices: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]:
        """Return the decoded windows at `indices`."""
        return [decode(tokens) for tokens in self.at(indices).tolist()]

    def example_index(self) -> ExampleIndex:
        return ExampleIndex(len(self), self._fingerprint)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.tokens, also=self.length)


class PackedTokens(EpochsByKey):
    """Training examples in epochs: {"tokens": int64 (b, length + 1), "key": int64 (b,)}.

    Keys seed random values; a window has a new key in each epoch. Raises UsageError if the text has fewer windows than
    one batch.
    """

    def __init__(self, tokens: np.ndarray, length: int, batch: int, seed: int):
        self.windows = TokenWindows(tokens, length)
        super().__init__(self.windows, batch, seed)
        if len(self.windows) < batch:
            raise UsageError(
                f"the training text has {len(tokens):,} tokens: {len(self.windows)} examples of length {length}, "
                f"fewer than one batch of {batch}",
                fix=_smaller(len(tokens), len(self.windows), batch),
            )


class HeldOutWindows(HeldOutByKey):
    """Windows for evaluation, with the same keys for every seed.

    Raises UsageError if the held-out text does not fill one example.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        self.windows = TokenWindows(tokens, length)
        super().__init__(self.windows)
        if len(self.windows) == 0:
            raise UsageError(
                f"the held-out text has {len(tokens):,} tokens, fewer than one example of length {length}",
                fix=f"--set data.held_out=0.2; or --set data.length={max(2, len(tokens) - 1)}",
            )


def _smaller(tokens: int, windows: int, batch: int) -> str:
    shorter = f"--set data.length={(tokens - 1) // batch}" if tokens > batch else ""
    fewer = f"--set data.batch={windows}" if windows else ""
    return "; or ".join(filter(None, (fewer, shorter))) or "--data my.txt, a longer text; or --data python-stdlib"
