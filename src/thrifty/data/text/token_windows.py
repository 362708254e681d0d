"""Examples cut from a stream of tokens: windows of equal length."""

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

    One window begins where the last token of the one before it lies, so that every token but the first is predicted
    once. What is left at the end and fills no window is not used.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def at(self, indices: np.ndarray) -> Tensor:
        """The windows of these numbers (b,) as int64 (b, length + 1)."""
        places = indices[:, None] * self.length + np.arange(self.length + 1)
        return torch.from_numpy(self.tokens[places].astype(np.int64))

    def fields(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {"tokens": self.at(indices)}

    def texts(self, indices: np.ndarray, decode: Callable[[list[int]], str]) -> list[str]:
        """The windows of these numbers as a person reads them."""
        return [decode(tokens) for tokens in self.at(indices).tolist()]

    def example_index(self) -> ExampleIndex:
        return ExampleIndex(len(self), self._fingerprint)

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.tokens, also=self.length)


class PackedTokens(EpochsByKey):
    """Training examples: {"tokens": int64 (b, length + 1), "key": int64 (b,)}, in epochs.

    The key is random bits of the example's own in this run (see `draws`): a window has another in each epoch.
    Raises UsageError where the text has fewer windows than one batch.
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
    """Windows for evaluation, with keys that are the same for every seed too.

    Raises UsageError where the held-out text does not fill one example.
    """

    def __init__(self, tokens: np.ndarray, length: int):
        self.windows = TokenWindows(tokens, length)
        super().__init__(self.windows)
        if len(self.windows) == 0:
            raise UsageError(
                f"the held-out text has {len(tokens):,} tokens, fewer than one example of length {length}",
                fix="raise data.held_out, or lower data.length",
            )


def _smaller(tokens: int, windows: int, batch: int) -> str:
    shorter = f"data.length to at most {(tokens - 1) // batch}" if tokens > batch else ""
    fewer = f"data.batch to at most {windows}" if windows else ""
    either = " or ".join(choice for choice in (fewer, shorter) if choice)
    return f"lower {either}" if either else "give more text"
