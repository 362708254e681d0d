"""SpAtten: tokens and heads that mattered least so far go for good, values of small weights are not fetched, and low
bits only where a softmax is flat.

Paper: Wang et al. 2021, SpAtten: Efficient Sparse Attention Architecture with Cascade Token and Head Pruning (HPCA,
arXiv 2012.09852).
"""

import torch
from torch import Tensor

TOKENS_SPARED, HEADS_SPARED = 0.15, 0.3
"""Of the blocks, from the first on, in which no token, or no head, goes."""
FLAT = 0.1
"""A softmax whose largest weight is below this is computed again with its low bits."""


def token_importance(probabilities: Tensor) -> Tensor:
    """What each key (b, s) was given by all heads and queries, of probabilities (b, h, t, s)."""
    return probabilities.float().sum((1, 2))


def head_importance(outputs: Tensor) -> Tensor:
    """The sum of |numbers| that each head (b, h) put out, of outputs (b, h, t, k)."""
    return outputs.float().abs().sum((2, 3))


def causal_importance(probabilities: Tensor) -> Tensor:
    """What each key (b, t, s) was given by all heads and by the queries up to and including each: what a causal model
    may know of it there. The last row is `token_importance`."""
    return probabilities.float().sum(1).cumsum(1)


def pruned_share(block: int, blocks: int, average: float, spread: float, spared: float) -> float:
    """The share that is gone in a block: none in the first `spared` of them, then along a line from
    average - spread / 2 to average + spread / 2."""
    start = round(spared * blocks)
    if block < start:
        return 0.0
    along = (block - start) / max(blocks - 1 - start, 1)
    return min(max(average + spread * (along - 0.5), 0.0), 1.0)


def cascade(importance: Tensor, alive: Tensor, keep: int, always: Tensor | None = None) -> Tensor:
    """Of what is still alive (…, n) the `keep` most important by sums over all blocks so far (…, n), and what is to
    stay `always`. What is not alive never is again."""
    ranked = importance.masked_fill(~alive, float("-inf"))
    if always is not None:
        ranked = ranked.masked_fill(always & alive, float("inf"))
    best = ranked.topk(min(max(keep, 1), importance.shape[-1]), dim=-1)
    return torch.zeros_like(alive).scatter(-1, best.indices, True) & alive


def local_values(probabilities: Tensor, keep: int) -> Tensor:
    """The `keep` keys of each query whose values are fetched, by the weights (…, t, s) of its own head: a mask."""
    best = probabilities.topk(min(max(keep, 1), probabilities.shape[-1]), dim=-1)
    return torch.zeros_like(probabilities, dtype=torch.bool).scatter(-1, best.indices, True)


def high_bits(x: Tensor, high: int, low: int) -> tuple[Tensor, Tensor]:
    """x rounded to high + low bits with a sign, over the range of its largest number, and the same without the low
    bits."""
    step = x.abs().amax().clamp(min=1e-30) / (2 ** (high + low - 1) - 1)
    whole = (x / step).round()
    return whole * step, (whole / 2**low).floor() * 2**low * step


def progressive_probabilities(q: Tensor, k: Tensor, visible: Tensor, high: int, low: int) -> tuple[Tensor, Tensor]:
    """Softmax (b, h, t, s) of queries and keys (b, h, n, k) of `high` bits, of high + low bits where that is flat; and
    which queries (b, h, t) were computed again."""
    (fine_q, coarse_q), (fine_k, coarse_k) = high_bits(q.float(), high, low), high_bits(k.float(), high, low)
    scale = q.shape[-1] ** -0.5
    coarse, fine = (
        (a @ b.mT * scale).masked_fill(~visible, float("-inf")).softmax(-1)
        for a, b in ((coarse_q, coarse_k), (fine_q, fine_k))
    )
    again = coarse.amax(-1) < FLAT
    return torch.where(again[..., None], fine, coarse), again
