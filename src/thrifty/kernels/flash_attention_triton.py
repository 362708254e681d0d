"""Flash attention in Triton for GPUs: attention in tiles with a running softmax, forward and backward.

Papers: Dao et al. 2022, FlashAttention (arXiv 2205.14135); Dao 2023, FlashAttention-2 (2307.08691), for the order of
the loops. In the forward pass and for query gradients, a program processes one tile of queries. For key gradients, it
processes one tile of keys. Memory is never proportional to the number of pairs, because the backward pass recomputes
the probabilities from the log-sum-exp.

The module is imported only if Triton is installed. It was run only in Triton's interpreter, never on a GPU. Sums are in
float32. Products of float32 are exact, not TF32. Causal attention skips tiles of later keys; it does not skip tiles of
pairs from different packed texts. `kernels/tiled_attention.py` contains a readable reference.

Shapes: b batch, h heads, g key-value heads, t tokens, k head width (a power of two, at least 16).
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.op_flops import FLOPS_OF
from thrifty.kernels.autocast_inputs import cast_for_autocast

TILE = 64
"""Default number of tokens per side of a tile."""


@triton.jit
def _tile(base, first, stride, tile: tl.constexpr, width: tl.constexpr, tokens):
    """Load rows first … first + tile - 1 of a matrix (t, k). Rows after the last are zero."""
    row, lane = first + tl.arange(0, tile), tl.arange(0, width)
    return tl.load(base + row[:, None] * stride + lane[None, :], mask=row[:, None] < tokens, other=0.0)


@triton.jit
def _seen(segments, first_row, first_column, tokens, causal: tl.constexpr, packed: tl.constexpr, tile: tl.constexpr):
    """Return a mask (tile, tile) of the visible pairs of a tile of queries and a tile of keys."""
    row, column = first_row + tl.arange(0, tile), first_column + tl.arange(0, tile)
    seen = (row[:, None] < tokens) & (column[None, :] < tokens)
    if causal:
        seen = seen & (column[None, :] <= row[:, None])
    if packed:
        row_segments = tl.load(segments + row, mask=row < tokens, other=-1)
        column_segments = tl.load(segments + column, mask=column < tokens, other=-1)
        seen = seen & (row_segments[:, None] == column_segments[None, :])
    return seen


@triton.jit
def _forward_kernel(
    q, k, v, segments, output, lse, tokens, heads, sharing, scale,
    causal: tl.constexpr, packed: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * tile, tl.program_id(1).to(tl.int64)
    key_head = head // sharing  # heads that share keys are consecutive
    q, output = q + head * tokens * width, output + head * tokens * width
    k, v = k + key_head * tokens * width, v + key_head * tokens * width
    segments += head // heads * tokens
    queries = _tile(q, first, width, tile, width, tokens)
    largest = tl.full((tile,), float("-inf"), dtype=tl.float32)
    total, weighted = tl.zeros((tile,), dtype=tl.float32), tl.zeros((tile, width), dtype=tl.float32)
    end = first + tile if causal else tokens
    for at in range(0, end, tile):
        keys = _tile(k, at, width, tile, width, tokens)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(_seen(segments, first, at, tokens, causal, packed, tile), scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        probability, turn = tl.exp(scores - finite[:, None]), tl.exp(largest - finite)
        values = _tile(v, at, width, tile, width, tokens)
        weighted = weighted * turn[:, None] + tl.dot(probability.to(values.dtype), values, input_precision="ieee")
        total, largest = total * turn + tl.sum(probability, 1), larger
    row, lane = first + tl.arange(0, tile), tl.arange(0, width)
    whole = tl.where(total == 0.0, 1.0, total)
    place = output + row[:, None] * width + lane[None, :]
    tl.store(place, (weighted / whole[:, None]).to(output.dtype.element_ty), mask=row[:, None] < tokens)
    tl.store(lse + head * tokens + row, largest + tl.log(whole), mask=row < tokens)


@triton.jit
def _gradients_of_scores(
    queries, keys, values, upstream, lse, shared, segments, first, at, tokens, scale,
    causal: tl.constexpr, packed: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Return probabilities (tile, tile), and gradients (tile, tile) of the unscaled scores. The tile's queries start at
    `first`, its keys at `at`.
    """
    row = first + tl.arange(0, tile)
    sums = tl.load(lse + row, mask=row < tokens, other=0.0)
    row_shared = tl.load(shared + row, mask=row < tokens, other=0.0)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    seen = _seen(segments, first, at, tokens, causal, packed, tile)
    probability = tl.exp(tl.where(seen, scores - sums[:, None], float("-inf")))
    grad_probability = tl.dot(upstream, tl.trans(values), input_precision="ieee")
    return probability, probability * (grad_probability - row_shared[:, None]) * scale


@triton.jit
def _queries_kernel(
    q, k, v, segments, grad_out, lse, shared, grad_q, tokens, heads, sharing, scale,
    causal: tl.constexpr, packed: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0) * tile, tl.program_id(1).to(tl.int64)
    key_head = head // sharing
    k, v = k + key_head * tokens * width, v + key_head * tokens * width
    segments += head // heads * tokens
    lse, shared = lse + head * tokens, shared + head * tokens
    queries = _tile(q + head * tokens * width, first, width, tile, width, tokens)
    upstream = _tile(grad_out + head * tokens * width, first, width, tile, width, tokens)
    gradient = tl.zeros((tile, width), dtype=tl.float32)
    end = first + tile if causal else tokens
    for at in range(0, end, tile):
        keys, values = _tile(k, at, width, tile, width, tokens), _tile(v, at, width, tile, width, tokens)
        _, grad_scores = _gradients_of_scores(
            queries, keys, values, upstream, lse, shared, segments, first, at, tokens, scale, causal, packed, tile
        )
        gradient += tl.dot(grad_scores.to(keys.dtype), keys, input_precision="ieee")
    row, lane = first + tl.arange(0, tile), tl.arange(0, width)
    place = grad_q + head * tokens * width + row[:, None] * width + lane[None, :]
    tl.store(place, gradient.to(grad_q.dtype.element_ty), mask=row[:, None] < tokens)


@triton.jit
def _keys_kernel(
    q, k, v, segments, grad_out, lse, shared, grad_k, grad_v, tokens, heads, sharing, scale,
    causal: tl.constexpr, packed: tl.constexpr, width: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    at, key_head = tl.program_id(0) * tile, tl.program_id(1).to(tl.int64)
    segments += key_head * sharing // heads * tokens
    keys = _tile(k + key_head * tokens * width, at, width, tile, width, tokens)
    values = _tile(v + key_head * tokens * width, at, width, tile, width, tokens)
    sum_k, sum_v = tl.zeros((tile, width), dtype=tl.float32), tl.zeros((tile, width), dtype=tl.float32)
    start = at if causal else 0
    for head in range(0, sharing):
        own = key_head * sharing + head
        for first in range(start, tokens, tile):
            queries = _tile(q + own * tokens * width, first, width, tile, width, tokens)
            upstream = _tile(grad_out + own * tokens * width, first, width, tile, width, tokens)
            probability, grad_scores = _gradients_of_scores(
                queries, keys, values, upstream, lse + own * tokens, shared + own * tokens, segments, first, at, tokens,
                scale, causal, packed, tile,
            )  # fmt: skip
            sum_v += tl.dot(tl.trans(probability.to(upstream.dtype)), upstream, input_precision="ieee")
            sum_k += tl.dot(tl.trans(grad_scores.to(queries.dtype)), queries, input_precision="ieee")
    row, lane = at + tl.arange(0, tile), tl.arange(0, width)
    place = key_head * tokens * width + row[:, None] * width + lane[None, :]
    tl.store(grad_k + place, sum_k.to(grad_k.dtype.element_ty), mask=row[:, None] < tokens)
    tl.store(grad_v + place, sum_v.to(grad_v.dtype.element_ty), mask=row[:, None] < tokens)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, segments: Tensor | None = None, tile: int = TILE
) -> Tensor:
    """Return attention of q (b, h, t, k) over k and v (b, g, t, k), as (b, h, t, k). With `segments` int64 (b, t),
    tokens attend only to tokens with the same id. Second derivatives and unsupported shapes raise UsageError.
    """
    width = q.shape[-1]
    if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1] or k.shape != v.shape or width < 16 or width & (width - 1):
        raise UsageError(
            f"flash attention does not support queries {tuple(q.shape)}, keys {tuple(k.shape)} and values "
            f"{tuple(v.shape)}",
            fix="pass q (b, h, t, k), k and v (b, g, t, k) with h a multiple of g, and k a power of two of at least 16",
        )
    inputs = (x.contiguous() for x in cast_for_autocast(q, k, v))
    if tile < 16 or tile & (tile - 1):
        raise UsageError(
            f"flash attention does not support tiles of {tile} tokens",
            fix="tile=64; or another power of two of at least 16",
        )
    return torch.ops.thrifty.flash_attention(*inputs, causal, segments, tile)[0]


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, float]:
    return q.shape[2], q.shape[1], q.shape[1] // k.shape[1], q.shape[-1] ** -0.5


@torch.library.custom_op("thrifty::flash_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, segments: Tensor | None, tile: int
) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, t, k), and the log-sum-exp of each query's scores (b, h, t)."""
    output, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if q.numel():
        grid = (triton.cdiv(q.shape[2], tile), q.shape[0] * q.shape[1])
        tensors = q, k, v, q if segments is None else segments.contiguous(), output, lse
        _forward_kernel[grid](*tensors, *_sizes(q, k), causal, segments is not None, q.shape[-1], tile)
    return output, lse


@_attention.register_fake
def _(q, k, v, causal, segments, tile):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("thrifty::flash_attention_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Tensor | None,
    output: Tensor,
    lse: Tensor,
    causal: bool,
    tile: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    if q.numel():
        shared = (grad_output.float() * output.float()).sum(-1)
        tensors = q, k, v, q if segments is None else segments.contiguous(), grad_output, lse, shared
        also = (*_sizes(q, k), causal, segments is not None, q.shape[-1], tile)
        tiles = triton.cdiv(q.shape[2], tile)
        _queries_kernel[(tiles, q.shape[0] * q.shape[1])](*tensors, grad_q, *also)
        _keys_kernel[(tiles, k.shape[0] * k.shape[1])](*tensors, grad_k, grad_v, *also)
    return grad_q, grad_k, grad_v


@_attention_backward.register_fake
def _(grad_output, q, k, v, segments, output, lse, causal, tile):
    return tuple(torch.empty_like(x) for x in (q, k, v))


def _keep_for_backward(ctx, inputs, output) -> None:
    q, k, v, ctx.causal, segments, ctx.tile = inputs
    ctx.save_for_backward(q, k, v, segments, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_output: Tensor, grad_lse: Tensor | None):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError("flash attention has no second derivative", fix="use torch's attention with SDPBackend.MATH")
    gradients = torch.ops.thrifty.flash_attention_backward(
        grad_output.contiguous(), *ctx.saved_tensors, ctx.causal, ctx.tile
    )
    return *gradients, None, None, None


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _flops(q: Tensor, products: int) -> int:
    """Return the FLOPs of `products` matmuls over all pairs, including causally masked pairs, as torch counts."""
    return 2 * products * q.shape[0] * q.shape[1] * q.shape[2] ** 2 * q.shape[-1]


FLOPS_OF[torch.ops.thrifty.flash_attention] = lambda q, *rest, **others: _flops(q, 2)
FLOPS_OF[torch.ops.thrifty.flash_attention_backward] = lambda grad_output, q, *rest, **others: _flops(q, 5)
