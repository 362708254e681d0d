"""SpAtten: tokens and heads that mattered least so far go for good, values of small weights are not fetched, and low
bits only where a softmax is flat.

Paper: Wang et al. 2021, SpAtten: Efficient Sparse Attention Architecture with Cascade Token and Head Pruning (HPCA,
arXiv 2012.09852).

A whole text is trained on at once, so each query has a view of its own of what is left: that of a model that has read
what the query sees. In an encoder all views are the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thrifty.kernels.attention_filters.keep_masks import exact_scores, heads_of_keys, seen_softmax

TOKENS_SPARED, HEADS_SPARED = 0.15, 0.3
"""Of the blocks, from the first on, in which no token, or no head, goes."""
FLAT = 0.1
"""A softmax whose largest weight is below this is computed again with its low bits."""
LOW_BITS = 4
"""Which those are, in all of the paper's formats."""


@dataclass(frozen=True)
class CascadeState:
    """What mattered in the blocks so far and what is left, in the view of each query."""

    tokens: Tensor
    """The importance of each key, (b, t, s)."""
    alive: Tensor
    """Which keys are left, (b, t, s)."""
    heads: Tensor
    """The importance of each head, (b, t, h)."""
    working: Tensor
    """Which heads are left, (b, t, h)."""


@dataclass(frozen=True)
class KeptShares:
    """Of one block: the shares of the tokens of an input, of the heads, and of a query's keys whose values it takes;
    and, of the tokens that are kept, the share that are the latest up to the query."""

    tokens: float
    heads: float
    values: float
    latest: float = 0.0


def token_importance(probabilities: Tensor) -> Tensor:
    """What each key (b, s) was given by all heads and queries, of probabilities (b, h, t, s)."""
    return probabilities.float().sum((1, 2))


def pruned_share(block: int, blocks: int, average: float, spread: float, spared: float) -> float:
    """The share that is gone in a block: none in the first `spared` of them, then along a line from
    average - spread / 2 to average + spread / 2."""
    start = round(spared * blocks)
    if block < start:
        return 0.0
    along = (block - start) / max(blocks - 1 - start, 1)
    return min(max(average + spread * (along - 0.5), 0.0), 1.0)


def cascade(importance: Tensor, alive: Tensor, keep: int | Tensor, always: Tensor | None = None) -> Tensor:
    """Of what is still alive (…, n) the `keep` (whole numbers (…, 1), or one) most important by sums over all blocks so
    far (…, n), and what is to stay `always`. What is not alive never is again."""
    ranked = importance.masked_fill(~alive, float("-inf"))
    if always is not None:
        ranked = ranked.masked_fill(always & alive, float("inf"))
    return highest(ranked, keep) & alive


def highest(ranked: Tensor, keep: int | Tensor) -> Tensor:
    """The `keep` largest of each row (…, n), one at least and the first ones of equals, as a mask."""
    rank = ranked.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return rank < (keep.clamp(min=1) if isinstance(keep, Tensor) else max(keep, 1))


def share_of(count: Tensor, share: float) -> Tensor:
    """A share of so many, in whole numbers, one at least."""
    return (count * share).round().long().clamp(min=1)


def initial_state(visible: Tensor, heads: int) -> CascadeState:
    """Before the first block: of visible pairs (b, 1 or h, t, s) all keys and all heads are left."""
    seen = visible.any(1)
    nothing = torch.zeros(*seen.shape[:2], heads, device=seen.device)
    return CascadeState(torch.zeros_like(seen, dtype=torch.float32), seen, nothing, torch.ones_like(nothing).bool())


def prune_tokens(standing: CascadeState, visible: Tensor, keep: KeptShares) -> CascadeState:
    """Without the keys and heads that mattered least so far; a query always keeps its own token, and the latest."""
    seen = visible.any(1)
    count = share_of(seen.sum(-1, keepdim=True), keep.tokens)
    place = torch.arange(seen.shape[-1], device=seen.device)
    back = place[:, None] - place
    alive = cascade(standing.tokens, standing.alive & seen, count, (back >= 0) & (back < share_of(count, keep.latest)))
    working = cascade(standing.heads, standing.working, max(round(keep.heads * standing.heads.shape[-1]), 1))
    return CascadeState(standing.tokens, alive, standing.heads, working)


def add_importance(standing: CascadeState, weights: Tensor, outputs: Tensor) -> CascadeState:
    """With what keys were given (b, h, t, s) and heads put out (b, h, t, k) in one more block. To a query's view counts
    what was computed for the tokens that are alive in it."""
    alive = standing.alive.float()
    tokens = standing.tokens + alive @ weights.float().sum(1)
    heads = standing.heads + alive @ outputs.float().abs().sum(-1).mT
    return CascadeState(tokens, standing.alive, heads, standing.working)


def cascade_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, before: CascadeState | None, keep: KeptShares, bits: int = 0
) -> tuple[Tensor, CascadeState]:
    """Attention of q (b, h, t, k) over those of k and v (b, g, t, k) that are left, of visible pairs (b, 1 or h, t, t);
    and what is known after it. A head that is gone puts out zeros. Weights whose values are not fetched are lost, as in
    the paper: the others do not make up for them. With `bits` the weights are those of queries and keys of so many
    bits, and more where they are flat; their gradients are those of exact ones."""
    with torch.autocast(q.device.type, enabled=False):
        k, v = heads_of_keys(k, q.shape[1]), heads_of_keys(v, q.shape[1])
        with torch.no_grad():
            visible = visible.expand(len(q), -1, -1, -1)
            now = prune_tokens(before or initial_state(visible, q.shape[1]), visible, keep)
            seen = visible & now.alive[:, None]
        weights = seen_softmax(exact_scores(q, k), seen)
        with torch.no_grad():
            rounded = progressive_probabilities(q, k, seen, bits, LOW_BITS)[0] if bits else weights
            computed = now.working.mT[..., None]
            fetched = highest(rounded, share_of(seen.sum(-1, keepdim=True), keep.values)) & computed
        weights = weights + (rounded - weights).detach()
        output = (weights * fetched).to(v.dtype) @ v
        with torch.no_grad():
            return output, add_importance(now, weights * computed, output)


def high_bits(x: Tensor, high: int, low: int) -> tuple[Tensor, Tensor]:
    """Vectors (…, k) rounded to high + low bits with a sign, over the range of each one's largest number (ours: so that
    none depends on others), and the same without the low bits."""
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (high + low - 1) - 1)
    whole = (x / step).round()
    return whole * step, (whole / 2**low).floor() * 2**low * step


def progressive_probabilities(q: Tensor, k: Tensor, visible: Tensor, high: int, low: int) -> tuple[Tensor, Tensor]:
    """Softmax (b, h, t, s) of queries and keys (b, h, n, k) of `high` bits, of high + low bits where that is flat; and
    which queries (b, h, t) were computed again."""
    (fine_q, coarse_q), (fine_k, coarse_k) = high_bits(q.float(), high, low), high_bits(k.float(), high, low)
    scale = q.shape[-1] ** -0.5
    coarse, fine = (seen_softmax(a @ b.mT * scale, visible) for a, b in ((coarse_q, coarse_k), (fine_q, fine_k)))
    again = coarse.amax(-1) < FLAT
    return torch.where(again[..., None], fine, coarse), again
