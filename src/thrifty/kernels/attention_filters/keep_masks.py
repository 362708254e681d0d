"""Keep sets: masks of pairs (b or 1, h or 1, t, s), and attention over what they have."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import UsageError


def visible_pairs(
    t: int, s: int, causal: bool, mask: Tensor | None = None, device: torch.device | None = None
) -> Tensor:
    """What may be kept at all: (1 or b, 1 or h, t, s). A `mask` is boolean, (b, 1 or h, 1 or t, s)."""
    if mask is not None and mask.dtype != torch.bool:
        raise UsageError(
            f"attention was given a mask of {mask.dtype}, which is added to scores", fix="filters take boolean masks"
        )
    if causal:
        refuse_other_lengths(t, s)
    seen = torch.ones(1, 1, t, s, dtype=torch.bool, device=device)
    if causal:
        seen = seen.tril()
    return seen if mask is None else seen & mask


def heads_of_keys(x: Tensor, heads: int) -> Tensor:
    """Keys or values (b, g, s, k), each head repeated for the queries that share it: (b, h, s, k)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def with_one(keep: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """What is visible of a keep set and, for each query that would keep nothing, its visible key of the highest score
    (b, h, t, s)."""
    keep, best = keep & visible, scores.masked_fill(~visible, float("-inf")).argmax(-1, keepdim=True)
    alone = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return keep | (alone & visible & ~keep.any(-1, keepdim=True))


def attend_kept(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Exact softmax attention over a keep set, by torch's kernels under a mask: what is computed, not what is saved."""
    return F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=q.shape[1] != k.shape[1])


def filtered_attention(
    keep: Callable[..., Tensor], causal: bool, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attention of q (b, h, t, k) over what `keep`, given q, k and what is visible, leaves of k and v (b, g, s, k)."""
    visible = visible_pairs(q.shape[2], k.shape[2], causal, mask, q.device)
    with torch.no_grad():
        kept = keep(q, k, visible=visible)
    return attend_kept(q, k, v, kept)


def seen_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the keys that are seen (b, 1 or h, t, s), zeros for a query that sees none."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen


def exact_scores(q: Tensor, k: Tensor) -> Tensor:
    """q (b, h, t, k) times k (b, g, s, k) by 1 / sqrt(k), in float32 at least: (b, h, t, s)."""
    accurate = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        return q.to(accurate) @ heads_of_keys(k, q.shape[1]).to(accurate).mT * q.shape[-1] ** -0.5


def refuse_other_lengths(t: int, s: int) -> None:
    """Raises UsageError where there are not as many queries as keys."""
    if t != s:
        raise UsageError(
            f"{t} queries and {s} keys have no common order",
            fix="give whole texts, without a cache of earlier keys (use_cache=False)",
        )


def core_weights(core: Callable[..., Tensor], q: Tensor, k: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Return the weights (b, h, t, s) of an attention core: its outputs for values that mark one key each.

    A core that takes something from the one before it, in its `relay`, computes each time as if it had not been called.
    """
    relay, width, parts = getattr(core, "relay", None), k.shape[3], []
    standing = getattr(relay, "standing", None)
    for mark in torch.eye(k.shape[2], dtype=k.dtype, device=k.device).split(width, dim=1):
        values = F.pad(mark, (0, width - mark.shape[1])).expand_as(k)
        parts.append(core(q, k, values, *rest, **named)[..., : mark.shape[1]])
        if relay is not None:
            relay.standing = standing
    return torch.cat(parts, -1)
