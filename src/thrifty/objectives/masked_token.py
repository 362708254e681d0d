"""Masked-token prediction (Devlin et al. 2019): predict masked tokens from both sides.

Paper       Devlin et al. 2019, BERT (arXiv 1810.04805), section 3.1. New masks in each epoch follow Liu et al. 2019,
            RoBERTa (arXiv 1907.11692).
Promise     The head computes logits for the predicted tokens only, a fraction `rate` of each text. By default 80 % of
            the predicted tokens become the mask, 10 % a random token, and the rest is unchanged.
Use         run = thrifty.train("bert-nano", "my.txt", loss="masked_token", budget="2000 steps")
            thrifty.export(run, "encoder")
Start with  `--set objective.name=masked_token --set objective.rate=0.15`. A higher rate trains on more tokens per text.
Cost        Only the predicted tokens have a loss, so training needs more text than next-token prediction.
Avoid       Models with causal attention, because they predict from the left side only.
Does not    Mask whole words, or remove masked tokens from the encoder; `data_selection.drop_masked_tokens` removes
            them.
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


def rounded_counts(fraction: float, count: int) -> tuple[int, int]:
    """Return fraction · count, rounded down and rounded up."""
    exact = round(fraction * count, 9)  # without rounding, 0.8 · 15 can exceed 12
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
    """Mask `count` tokens of each text. Return masked texts, predicted positions, target tokens and visible positions.

    Texts are (b, t), predicted positions and targets (b, count). Visible positions are (b, t - m), where m is the
    maximum number of masks of a row. `keys` (b,) seed all random choices. Random replacements are `ordinary` tokens.
    `special` tokens are predicted only if a text has fewer than `count` other tokens.
    """
    b, t = tokens.shape
    scores = random_integers(keys, t) >> np.uint64(1)
    scores |= np.isin(tokens, special).astype(np.uint64) << np.uint64(63)
    places = random_subset(scores, count)
    targets = np.take_along_axis(tokens, places, axis=1)
    order, random = np.split(random_integers(keys, 2 * count, skip=t), 2, axis=1)
    rank = order.argsort(axis=1).argsort(axis=1)
    offset = random_fractions(random_integers(keys, 1, skip=t + 2 * count))
    masks, changed = (_rounded(share, count, offset) for share in (mask_share, mask_share + random_share))
    replacements = ordinary[(random_fractions(random) * len(ordinary)).astype(np.int64)]
    shown = np.where(rank < masks, mask, np.where(rank < changed, replacements, targets))
    corrupted = tokens.copy()
    np.put_along_axis(corrupted, places, shown, axis=1)
    most = rounded_counts(mask_share, count)[1]
    is_visible = np.ones((b, t), dtype=bool)
    np.put_along_axis(is_visible, places, rank >= most, axis=1)
    return corrupted, places, targets, np.nonzero(is_visible)[1].reshape(b, t - most)


def _rounded(fraction: float, count: int, offset: np.ndarray) -> np.ndarray:
    """Return fraction · count for each row (b, 1), rounded up or down.

    The row's random `offset` in [0, 1) decides, so that the mean over rows is exact.
    """
    few, most = rounded_counts(fraction, count)
    return np.minimum(np.where(fraction * count - few > offset, most, few), count)


@dataclass(frozen=True)
class MaskedToken(TokenCrossEntropy):
    """Cross-entropy of masked tokens.

    Fields    "tokens" (b, t) with masks; "places" (b, k), ascending predicted positions; "targets" (b, k), the original
              tokens at these positions, with k = max(1, round(rate · t)). "visible" (b, n): ascending positions without
              a mask, for models whose encoder leaves out masked tokens.

    The fractions of masks and random tokens are exact on average. If 80 % of k is not an integer, some random rows have
    one mask more than others. n is t minus the maximum number of masks of a row. In a row with one mask fewer,
    "visible" also leaves out one predicted position without a mask, preferably a position with a random token.
    """

    rate: Fraction = 0.15
    """Fraction of the tokens that are predicted."""
    mask_share: Probability = 0.8
    """Fraction of the predicted tokens that the mask replaces."""
    random_share: Probability = 0.1
    """Fraction of the predicted tokens that a random token replaces; the rest is unchanged."""
    mask: int = -1
    """Mask token. `with_tokenizer` sets `mask`, `vocabulary` and `special`."""
    vocabulary: int = 0
    special: frozenset[int] = frozenset()
    """Tokens without text. They are never random replacements, and are predicted only if a text has too few other
    tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_share + self.random_share > 1 + 1e-9:
            raise UsageError(
                f"objective.mask_share {self.mask_share} and objective.random_share {self.random_share} sum to more "
                "than 1",
                fix=f"--set objective.random_share={max(0.0, 1 - self.mask_share):g}",
            )

    def special_tokens(self, length: int) -> tuple[str, ...]:
        return (MASK,)

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "MaskedToken":
        mask = tokens.number_of(MASK, "[MASK]")
        return replace(self, mask=mask, vocabulary=tokens.vocabulary, special=tokens.special | {mask})

    def examples(self, batch: Batch) -> Batch:
        """Mask texts (b, t+1); return the batch unchanged if it is already masked.

        The last token of a text is left out, because the next window begins with this token.
        """
        if "places" in batch.fields:
            return batch
        tokens = batch["tokens"][:, :-1].numpy()
        count = max(1, round(self.rate * tokens.shape[1]))
        vocabulary = self.mask, self._ordinary, self._special
        arrays = masked(tokens, batch["key"].numpy(), count, *vocabulary, self.mask_share, self.random_share)
        fields = dict(zip(("tokens", "places", "targets", "visible"), map(torch.from_numpy, arrays), strict=True))
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
