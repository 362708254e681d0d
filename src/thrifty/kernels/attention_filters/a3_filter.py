"""A3: keys found by a greedy search among the largest products of single elements, then keys near the best score.

Paper: Ham et al. 2020, A3: Accelerating Attention Mechanisms in Neural Networks with Approximation (HPCA).
"""

import math

import torch
from torch import Tensor

from thrifty.kernels.attention_filters.keep_masks import exact_scores, heads_of_keys, with_one

PRODUCTS = 2**24
"""Number of products searched at once."""


def greedy_scores(query: Tensor, keys: Tensor, rounds: Tensor, visible: Tensor) -> Tensor:
    """Return the greedy score of each key, (n, s) in float64, for queries (n, k) over their keys (n, s, k).

    `rounds` (n,) is the number of rounds per query. Each round adds the largest remaining product, if positive, to its
    key's score. Then it adds the smallest, if negative, unless the sum of all added products is negative by now. The
    paper's heaps over sorted columns yield the products in sorted order, so they are sorted here. A key that is not
    `visible` (n, s) takes no part.
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
    # products beyond a query's rounds may belong to hidden keys and be infinite
    up = highest.values.clamp(min=0).masked_fill(at >= rounds[:, None], 0.0)
    down = low.clamp(max=0).masked_fill(at >= taken[:, None], 0.0)
    scores = products.new_zeros(n, s)
    scores.scatter_add_(1, highest.indices // keys.shape[-1], up)
    return scores.scatter_add_(1, lowest.indices // keys.shape[-1], down)


def a3_candidates(q: Tensor, k: Tensor, share: float, visible: Tensor) -> Tensor:
    """Return keys with a positive greedy score after ⌈share · n⌉ rounds, (b, h, t, s), for n visible keys."""
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
    """Return the candidates with a softmax weight of at least `percent` of the best one's, (b, h, t, s)."""
    among = scores.masked_fill(~candidates, float("-inf"))
    return candidates & (among >= among.amax(-1, keepdim=True) + math.log(percent / 100))


def a3_keep(q: Tensor, k: Tensor, share: float, percent: float, visible: Tensor) -> Tensor:
    """Return the keys (b, h, t, s) that pass both selections; a query without a candidate keeps its best key."""
    scores = exact_scores(q, k)
    return with_one(post_scored(a3_candidates(q, k, share, visible), scores, percent), scores, visible)
