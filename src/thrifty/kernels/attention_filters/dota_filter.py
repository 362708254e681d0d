"""DOTA filter: a small trained detector estimates the scores. Every query keeps the same number of keys.

Paper: Qu et al. 2022, DOTA: Detect and Omit Weak Attentions for Scalable Transformer Acceleration (ASPLOS); and its
precursor, Liu et al. 2021 (arXiv 2110.11299). The body of the paper was not read. The projection's probabilities and
the token order are recalled, not checked against the paper. The loss is from a note on the paper.
"""

import math

import torch
from torch import Tensor

from thrifty.kernels.rotary_embedding import rotate


def sparse_projection(width: int, reduced: int, generator: torch.Generator) -> Tensor:
    """Return a random projection P (d, k) in float32. Elements are ±sqrt(3 / k) with probability 1/6 each, else 0
    (Achlioptas 2003).
    """
    uniform = torch.rand(width, reduced, generator=generator, device=generator.device)
    signs = torch.where(uniform < 1 / 6, 1.0, torch.where(uniform < 1 / 3, -1.0, 0.0))
    return math.sqrt(3 / reduced) * signs


def detected_scores(
    x: Tensor, projection: Tensor, w_q: Tensor, w_k: Tensor, turns: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return estimated scores (x P W_q) (x P W_k)ᵀ, (b, h, t, t), of tokens x (b, t, d), with W_q and W_k (h, k, k).

    With `turns`, cosines and sines (t, k/2), both operands are first rotated by position (rotary embedding).
    """
    reduced = (x.to(projection.dtype) @ projection)[:, None]
    q, k = reduced @ w_q, reduced @ w_k
    if turns is not None:
        q, k = rotate(q, *turns), rotate(k, *turns)
    return q @ k.mT


def detector_loss(estimated: Tensor, exact: Tensor, visible: Tensor) -> Tensor:
    """Return the mean squared difference of scores (b, h, t, s) over visible pairs, one value per example (b,)."""
    difference = (estimated - exact).float().square().masked_fill(~visible, 0.0)
    return difference.sum((1, 2, 3)) / visible.expand_as(difference).sum((1, 2, 3)).clamp(min=1)


def balanced_keys(scores: Tensor, count: int, visible: Tensor, counts: Tensor | None = None) -> Tensor:
    """Return the indices (b, h, t, m) of the `count` keys with the highest scores (b, h, t, s) per query, -1 if fewer
    are visible.

    With `counts` (b,), each example keeps its own number of keys.
    """
    best = scores.masked_fill(~visible, float("-inf")).topk(min(count, scores.shape[-1]), dim=-1)
    kept = best.values > float("-inf")
    if counts is not None:
        kept &= torch.arange(kept.shape[-1], device=kept.device) < counts[:, None, None, None]
    return torch.where(kept, best.indices, -1)


def keep_of(keys: Tensor, count: int) -> Tensor:
    """Return key indices as a mask (b, h, t, count)."""
    spare = torch.where(keys < 0, count, keys)
    mask = torch.zeros(*keys.shape[:-1], count + 1, dtype=torch.bool, device=keys.device)
    return mask.scatter(-1, spare, True)[..., :count]
