"""Causal softmax attention in tiles, with plain torch operations that a compiler can fuse.

Papers: Dao et al. 2022, FlashAttention (arXiv 2205.14135), and Dao 2023 (arXiv 2307.08691). As in FlashAttention, the
backward pass recomputes the probabilities from the saved log-sum-exp of each query, so no tensor of size t·t is saved.
Unlike FlashAttention, a tile spans all keys that its queries can see, so the softmax needs no running maximum. The
upper triangle is skipped in whole tiles.

The module is made for CPUs, where torch's fused kernel has a slow backward pass, and for `torch.compile`. Without
compilation it makes many passes over memory. The forward pass iterates over tiles of queries, the backward pass over
tiles of keys. The backward pass then concatenates the score gradients along the keys. Every gradient is therefore one
matmul per tile, and a compiler finds no sums over tiles to fuse into later operations.

Shapes: b batch, h heads, g key-value heads, r = h/g query heads per key-value head, t tokens, k head width.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_dropout import draw_seed, dropout_factors

AttentionFunction = TypeVar("AttentionFunction", bound=Callable[..., Any])


def mark_plain_attention(causal: bool) -> Callable[[AttentionFunction], AttentionFunction]:
    """Mark a function as plain softmax attention (causal or not), which techniques may replace."""

    def mark(function: AttentionFunction) -> AttentionFunction:
        vars(function)["is_causal"] = causal
        return function

    return mark


def tiled_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    tile: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return causal attention (b, h, t, k) of q (b, h, t, k) over k and v (b, g, t, k).

    Pairs that are False in `mask` (b, 1, t, t) are hidden in addition to later keys; every token must see itself.
    Matmuls run in the dtype of the inputs, softmax in float32. The r query heads of one key head are stacked as rows of
    one matrix, so keys are not copied. `tile` is a number of tokens, by default t / 4, but between 64 and 512. Small
    tiles skip more of the upper triangle than large tiles, but each tile is unrolled and lengthens compilation. Weights
    are dropped at the rate `dropout`.
    """
    tile = tile or min(max(-(-q.shape[2] // 4), 64), 512)
    with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
        seed = draw_seed(q.device) if dropout else None
        return _TiledCausalAttention.apply(q, k, v, mask, tile, dropout, seed)


@mark_plain_attention(causal=True)
def causal_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return the result (b, h, t, k) of `tiled_causal_attention` from torch's own kernel. Here, a mask must also hide
    later tokens.
    """
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=shared)


@mark_plain_attention(causal=False)
def full_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Return softmax attention over all pairs that the mask allows, by torch's kernels.

    `scale` multiplies the scores; the default is 1 / sqrt(k).
    """
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale, enable_gqa=shared)


def segment_mask(segments: Tensor) -> Tensor:
    """Return a causal mask (b, 1, t, t) for packed texts, from the text id of each token (b, t).

    It is True for pairs in which a token sees itself or an earlier token of its own text.
    """
    return (segments[:, :, None] == segments[:, None, :]).tril()[:, None]


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tile: int, dropout: float = 0.0, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, t, k), and the log-sum-exp of each query's scores (b, h, t, 1)."""
    outputs, lses = [], []
    grouped = q.unflatten(1, (k.shape[1], -1))  # (b, g, r, t, k)
    for start in range(0, q.shape[2], tile):
        stop = min(start + tile, q.shape[2])
        scores = _scores(grouped[..., start:stop, :], start, k[:, :, :stop], 0, mask)
        largest = scores.amax(-1, keepdim=True)
        probability = (scores - largest).exp()
        total = probability.sum(-1, keepdim=True)
        if seed is not None:
            probability = probability * _factors(grouped[..., start:stop, :], start, stop, 0, dropout, seed)
        output = (probability.to(v.dtype) @ v[:, :, :stop]).to(total.dtype) / total
        outputs.append(output.to(v.dtype).unflatten(2, (-1, stop - start)))
        lses.append((largest + total.log()).unflatten(2, (-1, stop - start)))
    return torch.cat(outputs, 3).flatten(1, 2), torch.cat(lses, 3).flatten(1, 2)


def tiled_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, output: Tensor, lse: Tensor, tile: int,
    dropout: float = 0.0, seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q (b, h, t, k), k and v (b, g, t, k)."""
    accurate = lse.dtype
    grouped, grad_grouped, lse = (x.unflatten(1, (k.shape[1], -1)) for x in (q, grad_output, lse))
    shared = (grad_output.to(accurate) * output.to(accurate)).sum(-1, keepdim=True).unflatten(1, (k.shape[1], -1))
    starts = range(0, q.shape[2], tile)
    grad_q, grad_k, grad_v, columns = [], [], [], []
    for start in starts:
        keys, values = (x[:, :, start : start + tile] for x in (k, v))
        rows, grad_rows, row_lse, row_shared = (
            x[..., start:, :].flatten(2, 3) for x in (grouped, grad_grouped, lse, shared)
        )
        probability = (_scores(grouped[..., start:, :], start, keys, start, mask) - row_lse).exp()
        grad_probability = (grad_rows @ values.transpose(-1, -2)).to(accurate)
        used = probability
        if seed is not None:
            factors = _factors(grouped[..., start:, :], start, start + keys.shape[2], start, dropout, seed)
            used, grad_probability = probability * factors, grad_probability * factors
        grad_scores = (probability * (grad_probability - row_shared) * q.shape[-1] ** -0.5).to(q.dtype)
        grad_v.append(used.to(v.dtype).transpose(-1, -2) @ grad_rows)
        grad_k.append(grad_scores.transpose(-1, -2) @ rows)
        columns.append(grad_scores.unflatten(2, (-1, q.shape[2] - start)))
    for start in starts:
        stop = min(start + tile, q.shape[2])
        row = torch.cat(
            [column[..., start - at : stop - at, :] for at, column in zip(starts, columns, strict=True) if at < stop],
            -1,
        )
        grad_q.append((row.flatten(2, 3) @ k[:, :, :stop]).unflatten(2, (-1, stop - start)))
    return torch.cat(grad_q, 3).flatten(1, 2), torch.cat(grad_k, 2), torch.cat(grad_v, 2)


def _scores(grouped: Tensor, first_query: int, keys: Tensor, first_key: int, mask: Tensor | None) -> Tensor:
    """Return scaled scores (b, g, r·n, m), -inf for invisible pairs, of queries (b, g, r, n, k) and keys (b, g, m,
    k).
    """
    rows, count = grouped.flatten(2, 3), grouped.shape[3]
    scores = (rows @ keys.transpose(-1, -2)).to(torch.promote_types(rows.dtype, torch.float32)) * rows.shape[-1] ** -0.5
    query = (torch.arange(count, device=rows.device) + first_query).repeat(grouped.shape[2])[:, None]
    key = torch.arange(keys.shape[2], device=rows.device) + first_key
    hidden = key > query
    if mask is not None:
        seen = mask[..., first_query : first_query + count, first_key : first_key + keys.shape[2]]
        hidden = hidden | ~seen.repeat(1, 1, grouped.shape[2], 1)
    return scores.masked_fill(hidden, float("-inf"))


def _factors(grouped: Tensor, first_query: int, end: int, first_key: int, dropout: float, seed: Tensor) -> Tensor:
    """Return the dropout factors (b, g, r·n, m) of queries (b, g, r, n, k) and keys from `first_key` to `end`."""
    heads = torch.arange(grouped[..., 0, 0].numel(), device=grouped.device).view(*grouped.shape[:3], 1, 1)
    queries = torch.arange(first_query, first_query + grouped.shape[3], device=grouped.device)[:, None]
    return dropout_factors(seed, dropout, heads, queries, torch.arange(first_key, end, device=grouped.device)).flatten(
        2, 3
    )


class _TiledCausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, tile, dropout, seed):  # type: ignore[override]
        output, lse = tiled_forward(q, k, v, mask, tile, dropout, seed)
        ctx.tile, ctx.dropout = tile, dropout
        ctx.save_for_backward(q, k, v, mask, output, lse, seed)
        return output

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "tiled causal attention has no second derivative", fix="use torch's attention with SDPBackend.MATH"
            )
        *tensors, seed = ctx.saved_tensors
        return *tiled_backward(grad_output, *tensors, ctx.tile, ctx.dropout, seed), None, None, None, None
