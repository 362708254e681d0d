"""SpAtten filter: cascade pruning of tokens and heads, skipped values of small weights, least significant ("low") bits
only for flat softmaxes.

Paper: Wang et al. 2021, SpAtten: Efficient Sparse Attention Architecture with Cascade Token and Head Pruning (HPCA,
arXiv 2012.09852). The least important tokens and heads are pruned for all later blocks.

Training processes a whole text at once, so each query has its own view of the remaining tokens: the view of a model
that has read only the tokens that the query can see. In an encoder all views are equal.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.kernels.attention_filters.keep_masks import exact_scores, heads_of_keys, seen_softmax

TOKENS_SPARED, HEADS_SPARED = 0.15, 0.3
"""Fraction of the blocks, counted from the first, without token pruning, and without head pruning."""
FLAT = 0.1
"""Flatness threshold. A softmax whose largest weight is below this threshold is recomputed with the low bits."""
LOW_BITS = 4
"""Number of low (least significant) bits in all formats of the paper."""


@dataclass(frozen=True)
class CascadeState:
    """Accumulated importance, and remaining tokens and heads, in the view of each query."""

    tokens: Tensor
    """Importance of each key, (b, t, s)."""
    alive: Tensor
    """Remaining keys, (b, t, s)."""
    heads: Tensor
    """Importance of each head, (b, t, h)."""
    working: Tensor
    """Remaining heads, (b, t, h)."""


@dataclass(frozen=True)
class KeptShares:
    """Fractions that one block keeps: of the tokens, of the heads, and of the values that each query fetches.

    `latest` is the fraction of the kept tokens that are the most recent tokens before the query.
    """

    tokens: float
    heads: float
    values: float
    latest: float = 0.0


def token_importance(probabilities: Tensor) -> Tensor:
    """Return the importance (b, s) of each key: the sum of probabilities (b, h, t, s) over heads and queries."""
    return probabilities.float().sum((1, 2))


def pruned_share(block: int, blocks: int, average: float, spread: float, spared: float) -> float:
    """Return the pruned fraction of a block. It is 0 in the first `spared` fraction of the blocks. Then it grows
    linearly from average - spread / 2 to average + spread / 2.
    """
    start = round(spared * blocks)
    if block < start:
        return 0.0
    along = (block - start) / max(blocks - 1 - start, 1)
    return min(max(average + spread * (along - 0.5), 0.0), 1.0)


def cascade(importance: Tensor, alive: Tensor, keep: int | Tensor, always: Tensor | None = None) -> Tensor:
    """Return a mask (…, n) of the `keep` most important remaining entries and the entries in `always`. The `importance`
    (…, n) is summed over all blocks so far. `keep` is an integer or integers (…, 1). Entries that are not in `alive`
    (…, n) stay pruned.
    """
    ranked = importance.masked_fill(~alive, float("-inf"))
    if always is not None:
        ranked = ranked.masked_fill(always & alive, float("inf"))
    return highest(ranked, keep) & alive


def highest(ranked: Tensor, keep: int | Tensor) -> Tensor:
    """Return a mask of the `keep` largest entries per row (…, n), at least one. Of equal entries the first are kept."""
    rank = ranked.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return rank < (keep.clamp(min=1) if isinstance(keep, Tensor) else max(keep, 1))


def share_of(count: Tensor, share: float) -> Tensor:
    """Return round(count · share) as integers (…, 1), at least one."""
    return (count * share).round().long().clamp(min=1)


def initial_state(visible: Tensor, heads: int) -> CascadeState:
    """Return the state before the first block. All keys of visible pairs (b, 1 or h, t, s) and all heads remain."""
    seen = visible.any(1)
    nothing = torch.zeros(*seen.shape[:2], heads, device=seen.device)
    return CascadeState(torch.zeros_like(seen, dtype=torch.float32), seen, nothing, torch.ones_like(nothing).bool())


def prune_tokens(standing: CascadeState, visible: Tensor, keep: KeptShares) -> CascadeState:
    """Prune the least important keys and heads of visible pairs (b, 1 or h, t, s).

    A query always keeps its own token and the latest tokens.
    """
    seen = visible.any(1)
    count = share_of(seen.sum(-1, keepdim=True), keep.tokens)
    position = torch.arange(seen.shape[-1], device=seen.device)
    distance = position[:, None] - position
    alive = cascade(
        standing.tokens, standing.alive & seen, count, (distance >= 0) & (distance < share_of(count, keep.latest))
    )
    working = cascade(standing.heads, standing.working, max(round(keep.heads * standing.heads.shape[-1]), 1))
    return CascadeState(standing.tokens, alive, standing.heads, working)


def add_importance(standing: CascadeState, weights: Tensor, outputs: Tensor) -> CascadeState:
    """Return the state after one more block, from weights of keys (b, h, t, s) and outputs of heads (b, h, t, k).

    In a query's view, only weights and outputs of its remaining tokens count.
    """
    alive = standing.alive.float()
    tokens = standing.tokens + alive @ weights.float().sum(1)
    heads = standing.heads + alive @ outputs.float().abs().sum(-1).mT
    return CascadeState(tokens, standing.alive, heads, standing.working)


def cascade_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    before: CascadeState | None,
    keep: KeptShares,
    bits: int = 0,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, CascadeState]:
    """Return attention of q (b, h, t, k) over the remaining k and v (b, g, t, k), and the state after it.

    `visible` pairs are (b, 1 or h, t, t). A pruned head outputs zeros. If a value is not fetched, its weight is lost,
    and the other weights are not rescaled, as in the paper. With `bits`, weights are computed from queries and keys
    with `bits` bits, and with more bits where the softmax is flat. Gradients are computed as if the weights were exact.
    """
    with torch.autocast(q.device.type, enabled=False):
        k, v = heads_of_keys(k, q.shape[1]), heads_of_keys(v, q.shape[1])
        with torch.no_grad():
            visible = visible.expand(len(q), -1, -1, -1)
            now = prune_tokens(before or initial_state(visible, q.shape[1]), visible, keep)
            seen = visible & now.alive[:, None]
        weights = seen_softmax(exact_scores(q, k, bias), seen)
        with torch.no_grad():
            rounded = progressive_probabilities(q, k, seen, bits, LOW_BITS, bias)[0] if bits else weights
            computed = now.working.mT[..., None]
            fetched = highest(rounded, share_of(seen.sum(-1, keepdim=True), keep.values)) & computed
        weights = weights + (rounded - weights).detach()
        output = F.dropout(weights * fetched, dropout).to(v.dtype) @ v
        with torch.no_grad():
            return output, add_importance(now, weights * computed, output)


def high_bits(x: Tensor, high: int, low: int) -> tuple[Tensor, Tensor]:
    """Return vectors (…, k) rounded to high + low signed bits, and the same vectors without the low bits.

    The largest element of each vector sets its range. This is our choice, so that no vector depends on other vectors.
    """
    step = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / (2 ** (high + low - 1) - 1)
    whole = (x / step).round()
    return whole * step, (whole / 2**low).floor() * 2**low * step


def progressive_probabilities(
    q: Tensor, k: Tensor, visible: Tensor, high: int, low: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the softmax (b, h, t, s) of queries and keys (b, h, n, k), and a mask (b, h, t) of flat queries.

    The softmax uses `high` bits. Flat queries are recomputed with high + low bits. A bias (b or 1, h or 1, t, s) is
    added to both scores, without rounding.
    """
    (fine_q, coarse_q), (fine_k, coarse_k) = high_bits(q.float(), high, low), high_bits(k.float(), high, low)
    scale = q.shape[-1] ** -0.5
    added = 0.0 if bias is None else bias
    coarse, fine = (
        seen_softmax(a @ b.mT * scale + added, visible) for a, b in ((coarse_q, coarse_k), (fine_q, fine_k))
    )
    is_flat = coarse.amax(-1) < FLAT
    return torch.where(is_flat[..., None], fine, coarse), is_flat
