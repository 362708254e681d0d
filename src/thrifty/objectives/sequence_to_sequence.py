"""Sequence to sequence (Raffel et al. 2020): predict a target text from a source, or cut-out spans of plain text.

Paper       Raffel et al. 2020, T5 (arXiv 1910.10683), section 3.1.4 and table 6, for plain text; pairs of texts:
            Sutskever et al. 2014 (arXiv 1409.3215).
Promise     The loss is the mean cross-entropy per target token of an example, in nats. Batches of plain text have no
            padding.
Use         run = thrifty.train("t5-nano", "pairs.tsv", loss="sequence_to_sequence", budget="2000 steps")
            print(run.loss)
Start with  `--set objective.name=sequence_to_sequence`. `rate` and `mean_span` set what is cut out of plain text.
Cost        An encoder pass over the source, a decoder pass over the target and cross-attention between them.
Avoid       Models without a decoder; a prompt and its answer fit `chat_answers`.
Does not    Weigh long targets more: each example has the same weight.
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

    Fields    "source" (b, s); "tokens" (b, t+1), the target after a start token; for padded rows "source_keep" (b, s)
              and "counted" (b, t), False on padding.
    Data      pairs of texts, or plain text with spans cut out (see `span_corruption`). The end-of-text token starts the
              target and ends source and target.
    """

    learns_from = ("text_pairs", "text")

    rate: Annotated[float, SettingBound(above=0, most=0.9)] = 0.15
    """Fraction of the tokens of plain text that is cut out."""
    mean_span: Annotated[float, SettingBound(least=1)] = 3.0
    """Mean length of a cut-out span in tokens."""
    sentinels: tuple[int, ...] = ()
    """Tokens that replace the spans. They are set with the tokenizer, like the next one."""
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
        """Return pairs unchanged, and texts (b, t+1) without their last token as corrupted source and target.

        The next window begins with the last token.
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
