"""Sequence to sequence: the cross-entropy of each token of a target, from a source and the tokens before it.

Fields    "source" (b, s); "tokens" (b, t+1), the target behind a start token; where rows are padded, "source_keep"
          (b, s) and "counted" (b, t), true for what is no padding. An example's loss is the mean over what counts.
Data      pairs, or plain text with spans cut out (see `span_corruption`). An end of text starts the target, ends both.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Prediction, TokenizerInfo
from thrifty.core.setting_bounds import SettingBound
from thrifty.objectives.span_corruption import corrupt_spans, sentinel, span_counts, text_length
from thrifty.objectives.token_cross_entropy import TokenCrossEntropy, prediction_of


@dataclass(frozen=True)
class SequenceToSequence(TokenCrossEntropy):
    """One text from another: pairs, or spans that were cut out of plain text."""

    learns_from = ("text_pairs", "text")

    rate: Annotated[float, SettingBound(above=0, most=0.9)] = 0.15
    """Share of the tokens of plain text that is cut out."""
    mean_span: Annotated[float, SettingBound(least=1)] = 3.0
    """Tokens in a span that is cut out, on average."""
    sentinels: tuple[int, ...] = ()
    """The tokens in the places of spans; like the next one they are known once the tokenizer is."""
    end_of_text: int = -1

    def text_length(self, length: int) -> int:
        return text_length(length, self.rate, self.mean_span)

    def special_tokens(self, length: int) -> tuple[str, ...]:
        _, spans = span_counts(self.text_length(length), self.rate, self.mean_span)
        return tuple(map(sentinel, range(spans)))

    def with_tokenizer(self, tokens: TokenizerInfo, length: int) -> "SequenceToSequence":
        sentinels = tuple(tokens.number_of(name) for name in self.special_tokens(length))
        return replace(self, sentinels=sentinels, end_of_text=tokens.end_of_text)

    def examples(self, batch: Batch) -> Batch:
        """Pairs as they are; texts (b, t+1) without their last token, which the next window begins with, corrupted."""
        if "source" in batch.fields:
            return batch
        tokens = batch["tokens"][:, :-1].numpy()
        sizes = span_counts(tokens.shape[1], self.rate, self.mean_span)
        source, target = corrupt_spans(tokens, batch["key"].numpy(), *sizes, np.array(self.sentinels))
        end = np.full((len(tokens), 1), self.end_of_text)
        made = {"source": np.hstack((source, end)), "tokens": np.hstack((end, target, end))}
        return Batch({name: torch.from_numpy(rows) for name, rows in made.items()}, batch.weight)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        keep = batch.fields.get("source_keep")
        return prediction_of(model, model(batch["source"], batch["tokens"][:, :-1], keep))

    def shares(self, batch: Batch) -> Tensor | None:
        counted = batch.fields.get("counted")
        return None if counted is None else counted / counted.sum(1, keepdim=True).clamp(min=1)

    def tokens(self, batch: Batch) -> int:
        """Those of the source."""
        keep = batch.fields.get("source_keep")
        return batch["source"].numel() if keep is None else int(keep.sum())
