"""The end-to-end memory network: a question looks through sentences several times, and is answered in a word.

Paper: Sukhbaatar et al. 2015, End-To-End Memory Networks (arXiv 1503.08895), sections 2 and 4. Its formulas are from
memory and from others' notes on it, and checked against nothing of the authors'.

Shapes: b batch, n sentences, w words of a sentence, d width, v vocabulary.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from thrifty.core.errors import UsageError

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What a state (b, d) gives each of the memories (b, n, d) that are there (b, n): weights (b, n)."""


def softmax_weights(state: Tensor, memories: Tensor, there: Tensor) -> Tensor:
    """Softmax over products, of what is there; a state and memories without a scale."""
    scores = torch.einsum("bd,bnd->bn", state, memories)
    return scores.masked_fill(~there, torch.finfo(scores.dtype).min).softmax(-1) * there


def spelled(words: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Words (…, w) of sentences, 0 being none, as two sums over them (…, v): word j of J counts 1 - j / J in one and
    1 - 2 j / J in the other, j from 1 on."""
    there = words != 0
    along = torch.arange(1, words.shape[-1] + 1, device=words.device) / there.sum(-1, keepdim=True).clamp(min=1)
    nothing = torch.zeros(*words.shape[:-1], vocabulary, device=words.device)
    return nothing.scatter_add(-1, words, (1 - along) * there), nothing.scatter_add(-1, words, (1 - 2 * along) * there)


def embedded(sentences: tuple[Tensor, Tensor], table: Tensor) -> Tensor:
    """Sentences, as `spelled`, in an embedding (v, d): the sum of their words' vectors (…, d), of which number k of d
    of word j of J is multiplied by (1 - j / J) - (k / d) (1 - 2 j / J)."""
    across = torch.arange(1, table.shape[1] + 1, dtype=table.dtype, device=table.device) / table.shape[1]
    once, turned = (sums.to(table.dtype) @ table for sums in sentences)
    return once - across * turned


def recency(there: Tensor, gaps: Tensor | None = None) -> Tensor:
    """How many sentences come after each (b, n), of those that are there; with `gaps` (b, n) so many more before each
    later one."""
    later = there.long() if gaps is None else there.long() + gaps * there
    return later.flip(-1).cumsum(-1).flip(-1) - later


class MemoryNetwork(nn.Module):
    """Inputs (b, n + 1, w), the question last, to logits of all words (b, v).

    A state starts as the question. In each of `hops`, memories are the sentences in one embedding, of which it takes
    the weighted sum in another, and that is added. `tying` is "adjacent" (each hop reads with the embedding that the
    one before answered with, the first with the question's, and the last embedding tells the answer) or "layer_wise"
    (all hops have the same two, and a matrix for the state). A learned vector per recency is added to each sentence; in
    training a tenth of the recencies are skipped, so that the model does not count on them.
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
            raise UsageError(f"{hops} hops over {sentences} sentences", fix="give at least 1 of each")
        self.width, self.hops, self.tying, self.skipped = width, hops, tying, skipped
        self.weigh: Weigh = softmax_weights
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
        sums = spelled(inputs, len(self.words[0]))
        sentences, question = (sums[0][:, :-1], sums[1][:, :-1]), (sums[0][:, -1], sums[1][:, -1])
        adjacent = self.tying == "adjacent"
        state = embedded(question, self.words[0] if adjacent else self.question)
        memories = [
            embedded(sentences, words) + times[ages] for words, times in zip(self.words, self.times, strict=True)
        ]
        for hop in range(self.hops):
            reads, gives = memories[hop : hop + 2] if adjacent else memories
            retrieved = torch.einsum("bn,bnd->bd", self.weigh(state, reads, there), gives)
            state = retrieved + (state if adjacent else state @ self.between.T)
        return state @ (self.words[-1] if adjacent else self.answer).T

    def gaps(self, there: Tensor) -> Tensor | None:
        """In training one recency in ten or so is left out."""
        return (torch.rand(there.shape, device=there.device) < self.skipped).long() if self.training else None
