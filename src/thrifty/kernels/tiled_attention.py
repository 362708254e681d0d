"""Softmax attention in tiles, with plain torch operations that a compiler can fuse.

Papers: Dao et al. 2022, FlashAttention (arXiv 2205.14135), and Dao 2023 (arXiv 2307.08691). As in FlashAttention, the
backward pass recomputes the probabilities from the saved log-sum-exp of each query, so no tensor of size t·t is saved.
Unlike FlashAttention, a tile spans all keys that its queries can see, so the softmax needs no running maximum. Causal
attention skips the upper triangle in whole tiles.

The module is made for CPUs, where torch's fused kernel has a slow backward pass, and for `torch.compile`. Without
compilation it makes many passes over memory. The forward pass iterates over tiles of queries, the backward pass over
tiles of keys. The backward pass then concatenates the score gradients along the keys. Every gradient is therefore one
matmul per tile, and a compiler finds no sums over tiles to fuse into later operations.

Shapes: b batch, h heads, g key-value heads, r = h/g query heads per key-value head, t queries, s keys, k head width;
a tile has n queries and m keys.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.attention_dropout import draw_seed, dropout_factors

LEAST = torch.finfo(torch.float32).min
TINY = torch.finfo(torch.float32).tiny
AttentionFunction = TypeVar("AttentionFunction", bound=Callable[..., Any])


def mark_plain_attention(causal: bool) -> Callable[[AttentionFunction], AttentionFunction]:
    """Mark a function as plain softmax attention (causal or not), which techniques may replace."""

    def mark(function: AttentionFunction) -> AttentionFunction:
        vars(function)["is_causal"] = causal
        return function

    return mark


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    tile: int | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Return attention (b, h, t, k) of q (b, h, t, k) over k and v (b, g, s, k).

    The queries of causal attention belong to the last t of s tokens, as with cached keys. Pairs that are False in
    `mask` (b or 1, h or 1, t or 1, s) are hidden, in causal attention in addition to later keys; the output of a query
    without visible keys is zero. `bias`, of a shape like the mask, is added to the scores. Matmuls run in the dtype of
    the inputs, softmax in float32. The r query heads of one key head are stacked as rows of one matrix, so keys are not
    copied. `tile` is a number of tokens, by default t / 4, but between 64 and 512. Small tiles skip more of the upper
    triangle than large tiles, but each tile is unrolled and lengthens compilation. Weights are dropped at the rate
    `dropout`. Raises UsageError if causal attention has fewer keys than queries.
    """
    tile = tile or min(max(-(-q.shape[2] // 4), 64), 512)
    if causal and q.shape[2] > k.shape[2]:
        raise UsageError(
            f"causal attention has no keys for {q.shape[2] - k.shape[2]} of {q.shape[2]} queries",
            fix="pass the keys of all queries; or causal=False",
        )
    mask, bias = (None if each is None else each.expand(-1, -1, q.shape[2], k.shape[2]) for each in (mask, bias))
    with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
        seed = draw_seed(q.device) if dropout else None
        return _TiledAttention.apply(q, k, v, mask, bias, causal, tile, dropout, seed)


@mark_plain_attention(causal=True)
def causal_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """Return the result (b, h, t, k) of `tiled_attention` from torch's own kernel. Here, a mask must also hide
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


@dataclass(frozen=True)
class Pairs:
    """Mask, position bias, causality and dropout of the pairs of queries and keys."""

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    earlier: int
    """Number of keys before those of the queries, s - t."""
    dropout: float
    seed: Tensor | None

    def scores(self, queries: Tensor, first_query: int, keys: Tensor, first_key: int) -> Tensor:
        """Return scores (b, g, r, n, m), -inf for hidden pairs, of queries (b, g, r, n, k) and keys (b, g, m, k)."""
        accurate, scale = torch.promote_types(queries.dtype, torch.float32), queries.shape[-1] ** -0.5
        if queries.dtype == torch.float16:  # products without the scale may exceed the range of float16
            queries, scale = queries * scale, 1.0
        products = (queries.flatten(2, 3) @ keys.transpose(-1, -2)).to(accurate) * scale
        scores = products.unflatten(2, queries.shape[2:4])
        rows = slice(first_query, first_query + scores.shape[3])
        columns = slice(first_key, first_key + scores.shape[4])
        if self.bias is not None:
            scores = scores + _grouped(self.bias[..., rows, columns], queries)
        hidden = None if self.mask is None else ~_grouped(self.mask[..., rows, columns], queries)
        if self.causal:
            query = torch.arange(rows.start, rows.stop, device=queries.device)[:, None]
            later = torch.arange(columns.start, columns.stop, device=queries.device) > query + self.earlier
            hidden = later if hidden is None else hidden | later
        return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))

    def factors(self, scores: Tensor, first_query: int, first_key: int) -> Tensor | None:
        """Return the dropout factors of scores (b, g, r, n, m); None without dropout."""
        if self.seed is None:
            return None
        *lead, rows, columns = scores.shape
        heads = torch.arange(math.prod(lead), device=scores.device).view(*lead, 1, 1)
        queries = torch.arange(first_query, first_query + rows, device=scores.device)[:, None]
        keys = torch.arange(first_key, first_key + columns, device=scores.device)
        return dropout_factors(self.seed, self.dropout, heads, queries, keys)


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, tile: int) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, t, k), and the log-sum-exp of each query's scores (b, h, t, 1)."""
    outputs, lses = [], []
    grouped = q.unflatten(1, (k.shape[1], -1))  # (b, g, r, t, k)
    for start in range(0, q.shape[2], tile):
        end = start + tile + pairs.earlier if pairs.causal else k.shape[2]
        keys, values = k[:, :, :end], v[:, :, :end]
        scores = pairs.scores(grouped[..., start : start + tile, :], start, keys, 0)
        # finite also for a query without visible keys, whose output is zero
        largest = scores.amax(-1, keepdim=True).clamp_min(LEAST)
        probability = (scores - largest).exp()
        total = probability.sum(-1, keepdim=True).clamp_min(TINY)
        if (factors := pairs.factors(scores, start, 0)) is not None:
            probability = probability * factors
        output = _product(probability.to(v.dtype), values).to(total.dtype) / total
        outputs.append(output.to(v.dtype))
        lses.append(largest + total.log())
    return torch.cat(outputs, 3).flatten(1, 2), torch.cat(lses, 3).flatten(1, 2)


def tiled_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, pairs: Pairs, output: Tensor, lse: Tensor, tile: int,
    of_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q (b, h, t, k), of k and v (b, g, s, k), and on request of the bias."""
    accurate, scale = lse.dtype, q.shape[-1] ** -0.5
    grouped, grad_grouped, lse = (x.unflatten(1, (k.shape[1], -1)) for x in (q, grad_output, lse))
    shared = (grad_output.to(accurate) * output.to(accurate)).sum(-1, keepdim=True).unflatten(1, (k.shape[1], -1))
    grad_bias = torch.zeros_like(pairs.bias, dtype=accurate) if of_bias and pairs.bias is not None else None
    starts = range(0, k.shape[2], tile)
    grad_q, grad_k, grad_v, columns = [], [], [], []
    for start in starts:
        keys, values = (x[:, :, start : start + tile] for x in (k, v))
        first = max(start - pairs.earlier, 0) // tile * tile if pairs.causal else 0
        rows, grad_rows, row_lse, row_shared = (x[..., first:, :] for x in (grouped, grad_grouped, lse, shared))
        scores = pairs.scores(rows, first, keys, start)
        probability = (scores - row_lse).exp()
        grad_probability = _product(grad_rows, values.transpose(-1, -2)).to(accurate)
        used = probability
        if (factors := pairs.factors(scores, first, start)) is not None:
            used, grad_probability = probability * factors, grad_probability * factors
        grad_scores = probability * (grad_probability - row_shared)
        if grad_bias is not None:
            part = grad_bias[..., first:, start : start + tile]
            part += grad_scores.flatten(1, 2).sum_to_size(part.shape)
        grad_scores = (grad_scores * scale).to(q.dtype)
        grad_v.append(used.to(v.dtype).flatten(2, 3).transpose(-1, -2) @ grad_rows.flatten(2, 3))
        grad_k.append(grad_scores.flatten(2, 3).transpose(-1, -2) @ rows.flatten(2, 3))
        columns.append((first, grad_scores))
    for start in range(0, q.shape[2], tile):
        stop = min(start + tile, q.shape[2])
        row = torch.cat([column[..., start - first : stop - first, :] for first, column in columns if first < stop], -1)
        grad_q.append(_product(row, k[:, :, : row.shape[-1]]))
    return torch.cat(grad_q, 3).flatten(1, 2), torch.cat(grad_k, 2), torch.cat(grad_v, 2), grad_bias


def _product(rows: Tensor, others: Tensor) -> Tensor:
    """Return the matmul of rows (b, g, r, n, k), as one matrix for all r, and matrices (b, g, k, m)."""
    return (rows.flatten(2, 3) @ others).unflatten(2, rows.shape[2:4])


def _grouped(pairs: Tensor, queries: Tensor) -> Tensor:
    """Return numbers of pairs (b or 1, h or 1, n, m) in the shape of queries (b, g, r, n, k)."""
    return pairs[:, :, None] if pairs.shape[1] == 1 else pairs.unflatten(1, queries.shape[1:3])


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, mask, bias, causal, tile, dropout, seed):  # type: ignore[override]
        output, lse = tiled_forward(q, k, v, Pairs(mask, bias, causal, k.shape[2] - q.shape[2], dropout, seed), tile)
        ctx.tile, ctx.causal, ctx.dropout = tile, causal, dropout
        ctx.save_for_backward(q, k, v, mask, bias, seed, output, lse)
        return output

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UsageError(
                "tiled attention has no second derivative", fix="use torch's attention with SDPBackend.MATH"
            )
        q, k, v, mask, bias, seed, output, lse = ctx.saved_tensors
        pairs = Pairs(mask, bias, ctx.causal, k.shape[2] - q.shape[2], ctx.dropout, seed)
        of_bias = ctx.needs_input_grad[4]
        *grads, of_pairs = tiled_backward(grad_output, q, k, v, pairs, output, lse, ctx.tile, of_bias)
        return *grads, None, None if of_pairs is None else of_pairs.to(bias.dtype), None, None, None, None
