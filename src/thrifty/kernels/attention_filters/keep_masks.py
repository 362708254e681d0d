"""Keep sets (masks of query-key pairs, (b or 1, h or 1, t, s)) and attention over keep sets."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import UsageError


def visible_pairs(
    t: int, s: int, causal: bool, mask: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the pairs that may be kept, (1 or b, 1 or h, t, s). `mask` must be boolean, (b, 1 or h, 1 or t, s). In
    causal attention a mask must hide later keys itself. It may show some of them, such as other patches of an image."""
    if mask is not None and mask.dtype != torch.bool:
        raise UsageError(
            f"attention filters require a boolean mask, not an additive mask of dtype {str(mask.dtype)!r}",
            fix="pass a boolean mask: mask == 0",
        )
    if causal:
        refuse_other_lengths(t, s)
    seen = torch.ones(1, 1, t, s, dtype=torch.bool, device=device)
    if causal and mask is None:
        seen = seen.tril()
    return seen if mask is None else seen & mask


def heads_of_keys(x: Tensor, heads: int) -> Tensor:
    """Return keys or values (b, g, s, k) as (b, h, s, k). Each head is repeated for the query heads that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def with_one(keep: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """Return the visible part of a keep set (b, h, t, s), with at least one key per query.

    A query that would keep no key keeps its visible key with the highest score.
    """
    keep, best = keep & visible, scores.masked_fill(~visible, float("-inf")).argmax(-1, keepdim=True)
    alone = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return keep | (alone & visible & ~keep.any(-1, keepdim=True))


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, dropout: float = 0.0, bias: Tensor | None = None
) -> Tensor:
    """Return exact softmax attention over a keep set (b, h, t, s), by torch's masked kernels. This saves no
    computation. `bias` is added to the scores.
    """
    if bias is not None:
        bias = bias.to(q.dtype)
        keep = bias.masked_fill(~keep, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, keep, dropout, enable_gqa=q.shape[1] != k.shape[1])


def filtered_attention(
    keep: Callable[..., Tensor],
    causal: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return attention of q (b, h, t, k) over the keys and values (b, g, s, k) that `keep(q, k, visible=…, bias=…)`
    keeps. `bias` (b or 1, h or 1, t, s) is added to the scores."""
    visible = visible_pairs(q.shape[2], k.shape[2], causal, mask, q.device)
    with torch.no_grad():
        kept = keep(q, k, visible=visible, bias=bias)
    return attend_kept(q, k, v, kept, dropout, bias)


def seen_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Return the softmax over visible keys. `seen` is (b, 1 or h, t, s). A query without visible keys has weights 0."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen


def exact_scores(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the scores q kᵀ / sqrt(k) + bias, (b, h, t, s) in float32 or wider, for q (b, h, t, k), k (b, g, s, k) and
    bias (b or 1, h or 1, t, s)."""
    accurate = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        scores = q.to(accurate) @ heads_of_keys(k, q.shape[1]).to(accurate).mT * q.shape[-1] ** -0.5
    return scores if bias is None else scores + bias


def refuse_other_lengths(t: int, s: int) -> None:
    """Raise UsageError if the numbers of queries and keys differ."""
    if t != s:
        raise UsageError(
            f"this attention requires as many queries as keys: {t} queries and {s} keys were passed",
            fix="pass whole texts, without a key-value cache: use_cache=False; or, for a module that merges its keys, "
            "choose attention.tiled",
        )


def core_weights(core: Callable[..., Tensor], q: Tensor, k: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Return the weights (b, h, t, s) of an attention core. They are the core's outputs for values that are unit
    vectors, one per key.

    If a core has a `relay` (state from the previous block), each call uses the same state.
    """
    relay, width, parts = getattr(core, "relay", None), k.shape[3], []
    standing = getattr(relay, "standing", None)
    for mark in torch.eye(k.shape[2], dtype=k.dtype, device=k.device).split(width, dim=1):
        values = F.pad(mark, (0, width - mark.shape[1])).expand_as(k)
        parts.append(core(q, k, values, *rest, **named)[..., : mark.shape[1]])
        if relay is not None:
            relay.standing = standing
    return torch.cat(parts, -1)
