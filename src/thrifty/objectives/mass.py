"""MASS (Song et al. 2019): mask one span of a text in the encoder and decode that span.

Paper       Song et al. 2019, MASS: Masked Sequence to Sequence Pre-training for Language Generation (arXiv
            1905.02450), section 3.
Promise     All positions of the span are equally likely. A span of one token is the task of BERT; a span of all tokens
            is the task of GPT.
Use         run = thrifty.train("marian-nano", "my.txt", loss="mass", budget="2000 steps")
            print(run.loss)
Start with  `--set objective.name=mass --set objective.rate=0.5`, as in the paper.
Cost        The encoder reads the whole text, and the decoder reads the span.
Avoid       Models without a decoder. T5 and other models without a table of positions, because their decoder uses
            distances inside the span, not text positions.
Does not    Leave some tokens of the span unmasked; the paper does so (unverified).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Prediction, TokenizerInfo
from thrifty.core.setting_bounds import Fraction
from thrifty.kernels.example_rng import random_fractions, random_integers
from thrifty.objectives.masked_token import MASK
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy, prediction_of


def hidden_span(
    tokens: np.ndarray, keys: np.ndarray, count: int, mask: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask a span of `count` tokens in each text. Return the masked texts, the spans and their positions.

    Texts are (b, t), spans and positions (b, count). `keys` (b,) seed the start of each span. All possible starts are
    equally likely.
    """
    starts = tokens.shape[1] - count + 1
    begins = (random_fractions(random_integers(keys, 1)) * starts).astype(np.int64)
    places = begins + np.arange(count)
    source = tokens.copy()
    np.put_along_axis(source, places, mask, axis=1)
    return source, np.take_along_axis(tokens, places, axis=1), places


@dataclass(frozen=True)
class Mass(TokenCrossEntropy):
    """Cross-entropy of a masked span.

    Fields    "source" (b, t): the text with the span masked. "tokens" (b, s+1): a mask, then the span. "positions"
              (b, s): the span's positions in the text. s = max(1, round(rate · t)). The decoder reads all of "tokens"
              except the last.

    A model with position embeddings, such as Marian, embeds the span at its original positions.
    """

    rate: Fraction = 0.5
    """Length of the span as a fraction of the text length."""
    mask: int = -1
    """Mask token, set with the tokenizer."""

    def special_tokens(self, length: int) -> tuple[str, ...]:
        return (MASK,)

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "Mass":
        return replace(self, mask=tokens.number_of(MASK, "[MASK]"))

    def examples(self, batch: Batch) -> Batch:
        """Mask a span of each text (b, t+1); return the batch unchanged if it already has masked spans.

        The last token of a text is left out, because the next window begins with this token.
        """
        if "source" in batch.fields:
            return batch
        tokens = batch["tokens"][:, :-1].numpy()
        count = max(1, round(self.rate * tokens.shape[1]))
        source, span, places = hidden_span(tokens, batch["key"].numpy(), count, self.mask)
        target = np.hstack((np.full((len(tokens), 1), self.mask), span))
        arrays = {"source": source, "tokens": target, "positions": places}
        return Batch({name: torch.from_numpy(rows) for name, rows in arrays.items()}, batch.weight)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        inputs = batch["source"], batch["tokens"][:, :-1], None, batch["positions"]
        return prediction_of(model, model(*inputs))

    def tokens(self, batch: Batch) -> int:
        return batch["source"].numel()
