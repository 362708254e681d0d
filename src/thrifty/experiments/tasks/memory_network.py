"""End-to-end memory network: attention over sentences in several hops, then a one-word answer.

Paper: Sukhbaatar et al. 2015, End-To-End Memory Networks (arXiv 1503.08895), sections 2 and 4. The formulas are
recalled, or taken from secondary sources. They were not compared with the authors' code.

Shapes: b batch, n sentences, w words of a sentence, d width, v vocabulary.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import UsageError

AttentionWeights = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that maps a state (b, d), n memories (b, n, d) and a mask (b, n) to attention weights (b, n)."""


def softmax_weights(state: Tensor, memories: Tensor, there: Tensor) -> Tensor:
    """Return the softmax over the unscaled dot products of the state and unmasked memories."""
    scores = torch.einsum("bd,bnd->bn", state, memories)
    return scores.masked_fill(~there, torch.finfo(scores.dtype).min).softmax(-1) * there


def position_sums(words: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return two position-weighted bag-of-words sums (…, v) of sentences with w words (…, w), in which 0 is padding.

    v is the vocabulary size. Words of a sentence are counted from 1. In the first sum, word j of J has weight 1 - j /
    J. In the second sum, it has weight 1 - 2 j / J.
    """
    there = words != 0
    along = torch.arange(1, words.shape[-1] + 1, device=words.device) / there.sum(-1, keepdim=True).clamp(min=1)
    nothing = torch.zeros(*words.shape[:-1], vocabulary, device=words.device)
    return nothing.scatter_add(-1, words, (1 - along) * there), nothing.scatter_add(-1, words, (1 - 2 * along) * there)


def position_encoding(sentences: tuple[Tensor, Tensor], table: Tensor) -> Tensor:
    """Return sentence embeddings of width d (…, d) with position encoding, from `position_sums` and an embedding table
    (v, d) of v words.

    For word j of J, element k of d is multiplied by (1 - j / J) - (k / d) (1 - 2 j / J).
    """
    across = torch.arange(1, table.shape[1] + 1, dtype=table.dtype, device=table.device) / table.shape[1]
    once, turned = (sums.to(table.dtype) @ table for sums in sentences)
    return once - across * turned


def recency(there: Tensor, gaps: Tensor | None = None) -> Tensor:
    """Return, for each unmasked sentence of b stories with n sentences (b, n), the number of later sentences. `gaps`
    (b, n) adds random offsets.
    """
    later = there.long() if gaps is None else there.long() + gaps * there
    return later.flip(-1).cumsum(-1).flip(-1) - later


class MemoryNetwork(nn.Module):
    """Memory network that maps inputs (b, n + 1, w) to logits (b, v) over v words. The last row is the question.

    An input has b stories of n sentences and w words per sentence.

    The state starts as the embedded question. Each of `hops` hops attends over the sentences in one embedding. It adds
    their weighted sum in another embedding to the state.

    With `tying` "adjacent", each hop attends with the output embedding of the previous hop. The first hop shares the
    embedding of the question, and the last output embedding predicts the answer. With "layer_wise", all hops share two
    embeddings, and a matrix maps the state.

    A learned vector per recency is added to each sentence. For robustness, training randomly skips a tenth of the
    recencies.
    """

    def __init__(
        self,
        vocabulary: int,
        sentences: int,
        width: int = 64,
        hops: int = 3,
        tying: Literal["adjacent", "layer_wise"] = "adjacent",
        skipped: float = 0.1,
    ):
        super().__init__()
        if hops < 1 or sentences < 1:
            raise UsageError(f"hops is '{hops}' and sentences is '{sentences}'", fix="set both to at least 1")
        self.width, self.hops, self.tying, self.skipped = width, hops, tying, skipped
        self.weigh: AttentionWeights = softmax_weights
        tables = hops + 1 if tying == "adjacent" else 2
        self.words = nn.ParameterList(torch.empty(vocabulary, width) for _ in range(tables))
        self.times = nn.ParameterList(torch.empty(2 * sentences, width) for _ in range(tables))
        if tying == "layer_wise":
            self.question = nn.Parameter(torch.empty(vocabulary, width))
            self.between = nn.Parameter(torch.empty(width, width))
            self.answer = nn.Parameter(torch.empty(vocabulary, width))
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        there = (inputs[:, :-1] != 0).any(-1)
        ages = recency(there, self.gaps(there)).clamp(max=len(self.times[0]) - 1)
        sums = position_sums(inputs, len(self.words[0]))
        sentences, question = (sums[0][:, :-1], sums[1][:, :-1]), (sums[0][:, -1], sums[1][:, -1])
        adjacent = self.tying == "adjacent"
        state = position_encoding(question, self.words[0] if adjacent else self.question)
        memories = [
            position_encoding(sentences, words) + times[ages]
            for words, times in zip(self.words, self.times, strict=True)
        ]
        for hop in range(self.hops):
            keys, values = memories[hop : hop + 2] if adjacent else memories
            retrieved = torch.einsum("bn,bnd->bd", self.weigh(state, keys, there), values)
            state = retrieved + (state if adjacent else state @ self.between.T)
        return state @ (self.words[-1] if adjacent else self.answer).T

    def gaps(self, there: Tensor) -> Tensor | None:
        """Return random gaps (b, n) for b stories of n sentences during training, and None in evaluation."""
        return (torch.rand(there.shape, device=there.device) < self.skipped).long() if self.training else None
