"""A3 filter: greedy search for keys with large products of single elements, then a threshold relative to the best
score.

Paper: Ham et al. 2020, A3: Accelerating Attention Mechanisms in Neural Networks with Approximation (HPCA).
"""

import math

import torch
from torch import Tensor

from thrifty.kernels.attention_filters.keep_masks import exact_scores, heads_of_keys, with_one

PRODUCTS = 2**24
"""Maximum number of products that are searched at once."""


def greedy_scores(query: Tensor, keys: Tensor, rounds: Tensor, visible: Tensor) -> Tensor:
    """Return the greedy score of each key, (n, s) in float64, for n queries (n, k) and their keys (n, s, k).

    `rounds` (n,) is the number of rounds per query. A product is one query element times one key element. Each round
    adds the largest remaining product, if positive, to its key's score. Then it adds the smallest remaining product, if
    negative, unless the sum of all added products is negative. The paper uses heaps over sorted columns; here the
    products are sorted. Keys that are not `visible` (n, s) are ignored.
    """
    (n, s), hidden = visible.shape, ~visible[..., None]
    products = (query[:, None, :] * keys).double()
    rounds = torch.minimum(rounds, visible.sum(-1) * keys.shape[-1])
    most = min(int(rounds.max()), products[0].numel())
    highest, lowest = (
        products.masked_fill(hidden, last).flatten(1).topk(most, largest=last < 0) for last in (-math.inf, math.inf)
    )
    total, taken = products.new_zeros(n), torch.zeros(n, dtype=torch.int64, device=products.device)
    low = lowest.values
    for i in range(most):
        on = i < rounds
        total = total + torch.where(on, highest.values[:, i], 0.0)
        takes = on & (total >= 0)
        total = total + torch.where(takes, low.gather(1, taken.clamp(max=most - 1)[:, None])[:, 0], 0.0)
        taken = taken + takes
    at = torch.arange(most, device=products.device)
    # products after a query's last round may belong to hidden keys and be infinite
    up = highest.values.clamp(min=0).masked_fill(at >= rounds[:, None], 0.0)
    down = low.clamp(max=0).masked_fill(at >= taken[:, None], 0.0)
    scores = products.new_zeros(n, s)
    scores.scatter_add_(1, highest.indices // keys.shape[-1], up)
    return scores.scatter_add_(1, lowest.indices // keys.shape[-1], down)


def a3_candidates(q: Tensor, k: Tensor, share: float, visible: Tensor) -> Tensor:
    """Return a mask (b, h, t, s) of keys with a positive greedy score after ⌈share · n⌉ rounds, for n visible keys."""
    (b, h, t, width), k = q.shape, heads_of_keys(k, q.shape[1])
    visible = visible.expand(b, h, t, k.shape[2])
    queries, seen = q.flatten(0, 2), visible.flatten(0, 2)
    rounds = (seen.sum(-1) * share).ceil().long()
    candidates, step = [], max(PRODUCTS // max(k.shape[2] * width, 1), 1)
    keys = k.flatten(0, 1)
    for start in range(0, len(queries), step):
        part = slice(start, start + step)
        own = torch.arange(start, min(start + step, len(queries)), device=q.device) // t
        candidates.append(greedy_scores(queries[part], keys[own], rounds[part], seen[part]) > 0)
    return torch.cat(candidates).view(b, h, t, -1) & visible


def post_scored(candidates: Tensor, scores: Tensor, percent: float) -> Tensor:
    """Return a mask (b, h, t, s) of the candidates with a softmax weight of at least `percent` % of the maximum."""
    among = scores.masked_fill(~candidates, float("-inf"))
    return candidates & (among >= among.amax(-1, keepdim=True) + math.log(percent / 100))


def a3_keep(q: Tensor, k: Tensor, share: float, percent: float, visible: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a mask (b, h, t, s) of keys that pass greedy search and threshold. Without candidates, a query keeps its
    best key. The search reads products of single elements, so only the threshold includes a bias (b or 1, h or 1, t, s)
    of the scores.
    """
    scores = exact_scores(q, k, bias)
    return with_one(post_scored(a3_candidates(q, k, share, visible), scores, percent), scores, visible)
