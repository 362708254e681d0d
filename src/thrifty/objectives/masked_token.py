"""Masked token: some tokens of a text are hidden, and predicted from all the others.

Paper     Devlin et al. 2019, BERT (arXiv 1810.04805), section 3.1: 15 % of the tokens are predicted; of these 80 % are
          replaced by the mask, 10 % by a random token, 10 % stay. Liu et al. 2019, RoBERTa (arXiv 1907.11692): other
          tokens each time that a text is seen.
Fields    "tokens" (b, t) as the model sees them, "places" (b, k) of the tokens to predict in ascending order, "targets"
          (b, k) what stood there. k = max(1, round(rate · t)), so the head is applied to k hidden states, not to t.
          "visible" (b, n) are places without a mask in ascending order, for models that leave out what is hidden.
Shares    are kept as exactly as whole tokens allow: where 80 % of k is no whole number, rows differ by one mask, at
          random, so that it is 80 % on average. n = t less the most masks that a row has; in rows with one fewer, one
          more that is predicted is not among the visible: one that a random token has replaced, if there is any.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.errors import UsageError
from thrifty.core.objective import Prediction, TokenizerInfo
from thrifty.core.setting_bounds import Fraction, Probability
from thrifty.kernels.example_rng import random_fractions, random_integers, random_subset
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy, prediction_of

MASK = "<mask>"


def counts_of_fates(share: float, count: int) -> tuple[int, int]:
    """The fewest and the most of `count` tokens that a share of them may come to, rounded down or up."""
    exact = round(share * count, 9)  # 0.8 · 15 is 12 and not a little more
    return math.floor(exact), math.ceil(exact)


def masked(
    tokens: np.ndarray,
    keys: np.ndarray,
    count: int,
    mask: int,
    ordinary: np.ndarray,
    special: np.ndarray,
    mask_share: float = 0.8,
    random_share: float = 0.1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Texts with `count` tokens each hidden (b, t), the places of these (b, count), what stood there (b, count), and
    visible places (b, t - m), m being the most masks that a row may have.

    `keys` (b,) decide all that is drawn. Random tokens are drawn among the `ordinary` ones; `special` ones are hidden
    only in a text that has too few others.
    """
    b, t = tokens.shape
    scores = random_integers(keys, t) >> np.uint64(1)
    scores |= np.isin(tokens, special).astype(np.uint64) << np.uint64(63)
    places = random_subset(scores, count)
    targets = np.take_along_axis(tokens, places, axis=1)
    fates, random = np.split(random_integers(keys, 2 * count, skip=t), 2, axis=1)
    rank = fates.argsort(axis=1).argsort(axis=1)
    offset = random_fractions(random_integers(keys, 1, skip=t + 2 * count))
    masks, changed = (_rounded(share, count, offset) for share in (mask_share, mask_share + random_share))
    strangers = ordinary[(random_fractions(random) * len(ordinary)).astype(np.int64)]
    shown = np.where(rank < masks, mask, np.where(rank < changed, strangers, targets))
    corrupted = tokens.copy()
    np.put_along_axis(corrupted, places, shown, axis=1)
    most = counts_of_fates(mask_share, count)[1]
    seen = np.ones((b, t), dtype=bool)
    np.put_along_axis(seen, places, rank >= most, axis=1)
    return corrupted, places, targets, np.nonzero(seen)[1].reshape(b, t - most)


def _rounded(share: float, count: int, offset: np.ndarray) -> np.ndarray:
    """How many of `count` tokens have a share in each row (b, 1), rounded up where the row's offset in [0, 1) says so:
    as often as makes the mean right."""
    few, most = counts_of_fates(share, count)
    return np.minimum(np.where(share * count - few > offset, most, few), count)


@dataclass(frozen=True)
class MaskedToken(TokenCrossEntropy):
    """The masked language model: hidden tokens from all others on both sides."""

    rate: Fraction = 0.15
    """Share of the tokens that is predicted."""
    mask_share: Probability = 0.8
    """Of these, the share that is replaced by the mask."""
    random_share: Probability = 0.1
    """Of these, the share that is replaced by a random token; the rest stays as it is."""
    mask: int = -1
    """The token that hides another; like the next two it is known once the tokenizer is."""
    vocabulary: int = 0
    special: frozenset[int] = frozenset()
    """Tokens that stand for no text: neither hidden nor drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UsageError(
                f"objective: mask_share {self.mask_share} and random_share {self.random_share} are more than all",
                fix="lower one of them, so that their sum is at most 1",
            )

    def special_tokens(self, length: int) -> tuple[str, ...]:
        return (MASK,)

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "MaskedToken":
        mask = tokens.number_of(MASK, "[MASK]")
        return replace(self, mask=mask, vocabulary=tokens.vocabulary, special=tokens.special | {mask})

    def examples(self, batch: Batch) -> Batch:
        """Texts (b, t+1) without their last token, which the next window begins with, as masked ones; what is masked
        already stays as it is."""
        if "places" in batch.fields:
            return batch
        tokens = batch["tokens"][:, :-1].numpy()
        count = max(1, round(self.rate * tokens.shape[1]))
        numbers = self.mask, self._ordinary, self._special
        made = masked(tokens, batch["key"].numpy(), count, *numbers, self.mask_share, self.random_share)
        fields = dict(zip(("tokens", "places", "targets", "visible"), map(torch.from_numpy, made), strict=True))
        return Batch(fields, batch.weight)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        return prediction_of(model, model(batch["tokens"]), batch["places"])

    def targets(self, batch: Batch) -> Tensor:
        return batch["targets"]

    def tokens(self, batch: Batch) -> int:
        return batch["tokens"].numel()

    @cached_property
    def _special(self) -> np.ndarray:
        return np.array(sorted(self.special))

    @cached_property
    def _ordinary(self) -> np.ndarray:
        return np.setdiff1d(np.arange(self.vocabulary), self._special)
