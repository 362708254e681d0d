"""Sequence to sequence (Raffel et al. 2020): predict a target text, or removed spans of a text.

Paper       Plain text: Raffel et al. 2020, T5 (arXiv 1910.10683), section 3.1.4 and table 6. Pairs of texts: Sutskever
            et al. 2014 (arXiv 1409.3215).
Promise     The loss of an example is the mean cross-entropy per target token, in nats. Batches of plain text need no
            padding.
Use         run = thrifty.train("t5-nano", "pairs.tsv", loss="sequence_to_sequence", budget="2000 steps")
            print(run.loss)
Start with  `--set objective.name=sequence_to_sequence`. For plain text, set `rate` and `mean_span` of removed spans.
Cost        An encoder pass over the source and a decoder pass over the target, with cross-attention.
Avoid       Decoder-only models and encoders. For prompts with answers, use `chat_answers`.
Does not    Give long targets more weight, because each example has the same weight.
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
    """Cross-entropy of a target text given a source text.

    Fields    "source" (b, s); "tokens" (b, t+1), a start token and the target. Padded rows also have "source_keep"
              (b, s) and "counted" (b, t), False on padding.
    Data      pairs of texts, or plain text whose spans are removed (see `span_corruption`). The end-of-text token ends
              both texts, and is also the start token.
    """

    learns_from = ("text_pairs", "text")

    rate: Annotated[float, SettingBound(above=0, most=0.9)] = 0.15
    """Fraction of plain-text tokens that span corruption removes."""
    mean_span: Annotated[float, SettingBound(least=1)] = 3.0
    """Mean length of a removed span in tokens."""
    sentinels: tuple[int, ...] = ()
    """Tokens that replace the removed spans. `with_tokenizer` sets `sentinels` and `end_of_text`."""
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
        """Return pairs unchanged; turn plain texts (b, t+1) into source and target by span corruption.

        The last token of a text is left out, because the next window begins with this token.
        """
        if "source" in batch.fields:
            return batch
        tokens = batch["tokens"][:, :-1].numpy()
        sizes = span_counts(tokens.shape[1], self.rate, self.mean_span)
        source, target = corrupt_spans(tokens, batch["key"].numpy(), *sizes, np.array(self.sentinels))
        end = np.full((len(tokens), 1), self.end_of_text)
        arrays = {"source": np.hstack((source, end)), "tokens": np.hstack((end, target, end))}
        return Batch({name: torch.from_numpy(rows) for name, rows in arrays.items()}, batch.weight)

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        keep = batch.fields.get("source_keep")
        return prediction_of(model, model(batch["source"], batch["tokens"][:, :-1], keep))

    def shares(self, batch: Batch) -> Tensor | None:
        counted = batch.fields.get("counted")
        return None if counted is None else counted / counted.sum(1, keepdim=True).clamp(min=1)

    def tokens(self, batch: Batch) -> int:
        """Return the number of source tokens without padding."""
        keep = batch.fields.get("source_keep")
        return batch["source"].numel() if keep is None else int(keep.sum())
