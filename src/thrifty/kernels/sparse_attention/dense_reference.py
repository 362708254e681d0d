"""Attention over kept pairs by a dense product: what the sparse ways are compared with."""

from torch import Tensor


def kept_attention_reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float | None = None) -> Tensor:
    """Softmax attention of q (b, h, t, k) over those keys and values (b, g, s, k) that `keep` has, boolean and
    broadcast to (b, h, t, s). A query that keeps nothing gets zeros."""
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    keep = keep.expand_as(scores)
    some = keep.any(-1, keepdim=True)
    # a row without keys would have no largest score: it sees all, and is zeroed
    return scores.masked_fill(~keep & some, float("-inf")).softmax(-1).masked_fill(~some, 0.0) @ v
