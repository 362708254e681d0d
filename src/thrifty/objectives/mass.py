"""MASS: one span of a text is hidden from the encoder, and the decoder writes it.

Paper     Song et al. 2019, MASS: Masked Sequence to Sequence Pre-training for Language Generation (arXiv 1905.02450),
          section 3: the span is half of the text and begins anywhere. A span of one token is BERT's task, one of all
          tokens GPT's.
Fields    "source" (b, t), the text with a mask in the place of each token of the span; "tokens" (b, s+1), the span
          behind a mask: the decoder is given all but the last, so at each place the token before it in the span;
          "positions" (b, s) of these places in the text. s = max(1, round(rate · t)).
Note      a model with a table of positions (Marian's) reads the span at its own; T5's only knows distances inside it.
          That the paper leaves some tokens of the span in sight, as BERT does, is from memory, and not done here.
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
    """Texts (b, t) with `count` tokens in a row each hidden behind a mask, these tokens (b, count), and their places
    (b, count). `keys` (b,) decide where the spans begin, every place with room behind it being as likely."""
    room = tokens.shape[1] - count + 1
    begins = (random_fractions(random_integers(keys, 1)) * room).astype(np.int64)
    places = begins + np.arange(count)
    source = tokens.copy()
    np.put_along_axis(source, places, mask, axis=1)
    return source, np.take_along_axis(tokens, places, axis=1), places


@dataclass(frozen=True)
class Mass(TokenCrossEntropy):
    """A hidden span of a text from what stands around it."""

    rate: Fraction = 0.5
    """Share of the tokens that the span is."""
    mask: int = -1
    """The token that hides another, known once the tokenizer is."""

    def special_tokens(self, length: int) -> tuple[str, ...]:
        return (MASK,)

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "Mass":
        return replace(self, mask=tokens.number_of(MASK, "[MASK]"))

    def examples(self, batch: Batch) -> Batch:
        """Texts (b, t+1) without their last token, which the next window begins with, with a hidden span; what has one
        already stays as it is."""
        if "source" in batch.fields:
            return batch
        tokens = batch["tokens"][:, :-1].numpy()
        count = max(1, round(self.rate * tokens.shape[1]))
        source, span, places = hidden_span(tokens, batch["key"].numpy(), count, self.mask)
        behind = np.hstack((np.full((len(tokens), 1), self.mask), span))
        made = {"source": source, "tokens": behind, "positions": places}
        return Batch({name: torch.from_numpy(rows) for name, rows in made.items()}, batch.weight)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        inputs = batch["source"], batch["tokens"][:, :-1], None, batch["positions"]
        return prediction_of(model, model(*inputs))

    def tokens(self, batch: Batch) -> int:
        """Those of the source."""
        return batch["source"].numel()
