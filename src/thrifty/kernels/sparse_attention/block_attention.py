"""Attention over kept blocks of query-key pairs: small dense matmuls, and no work for other blocks.

For each block of queries, the kept blocks of keys are concatenated. A softmax therefore sees its whole row, and needs
no running maximum. Rows with similar numbers of kept blocks are processed together, as many as fit the cache with their
scores. The backward pass recomputes the probabilities from the log-sum-exp of each query. Only inputs, output and
log-sum-exp are saved, and no tensor over pairs.

Query heads that share keys and a grid are rows of one matmul. Matmuls run in the dtype of the inputs, softmax in
float32 or wider. On a CPU the result does not depend on the number of threads. On a GPU, key gradients are summed in no
fixed order.
"""

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.op_flops import FLOPS_OF
from thrifty.kernels.attention_dropout import draw_seed
from thrifty.kernels.attention_filters.keep_masks import attend_kept
from thrifty.kernels.autocast_inputs import cast_for_autocast
from thrifty.kernels.sparse_attention.block_grid import BlockGrid, check_grid, visible_in_grid
from thrifty.kernels.sparse_attention.block_layout import chunks, dropout_of, from_blocks, lay_out_blocks, to_blocks
from thrifty.kernels.sparse_attention.visibility import VisibilityRule


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: BlockGrid,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: Tensor | None = None,
) -> Tensor:
    """Return attention (b, h, t, k) of q (b, h, t, k) over the visible keys and values (b, g, s, k) in kept blocks. The
    output is as wide as the values.

    `mask`, boolean (b, 1 or h, 1 or t, s), and `segments` int64 (b, t) hide more pairs: with `segments`, tokens see
    only tokens with an equal segment id. `scale` multiplies the scores; the default is 1 / sqrt(k). Weights are dropped
    at the rate `dropout`. With a `bias` (b or 1, h or 1, t, s) of the scores, all pairs are computed. Second
    derivatives and grids that do not fit raise UsageError.
    """
    check_grid(grid, q, k)
    if bias is not None:
        assert segments is None and scale is None
        keep = visible_in_grid(grid, q.shape[2], k.shape[2])
        return attend_kept(q, k, v, keep if mask is None else keep & mask, dropout, bias)
    q, k, v = cast_for_autocast(q, k, v)
    sight = grid.sight
    return torch.ops.thrifty.block_attention(
        q, k, v, grid.codes, mask, segments, grid.block, grid.count,
        sight.causal, sight.window, sight.first, q.shape[-1] ** -0.5 if scale is None else scale,
        dropout, draw_seed(q.device) if dropout else None,
    )[0]  # fmt: skip


@torch.library.custom_op("thrifty::block_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    block: int,
    count: int,
    causal: bool,
    window: int,
    first: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, t, k), and the log-sum-exp of each query's scores (b, h, t, 1), 0 if no key is kept."""
    with torch.autocast(q.device.type, enabled=False):
        work = lay_out_blocks(q, k, v, codes, mask, segments, block, VisibilityRule(causal, window, first), scale)
        output = work.q.new_zeros(*work.q.shape[:2], v.shape[-1])
        lse = work.q.new_zeros(work.q.shape[:2], dtype=_accurate(q))
        for chunk in chunks(work):
            scores = chunk.scores
            largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
            probability = scores.sub_(largest).exp_()
            total = probability.sum(-1, keepdim=True)
            values = work.v.index_select(0, chunk.keys).view(len(chunk.rows), -1, v.shape[-1])
            if seed is not None:
                probability.mul_(dropout_of(work, chunk, dropout, seed))
            weighted = torch.bmm(probability.to(v.dtype), values).to(total.dtype)
            output[chunk.rows] = weighted.div_(total.clamp(min=torch.finfo(total.dtype).tiny)).to(v.dtype)
            lse[chunk.rows] = torch.where(total > 0, largest + total.log(), 0.0).squeeze(-1)
        return from_blocks(output, work), from_blocks(lse[..., None], work)


@_attention.register_fake
def _(q, k, v, codes, mask, segments, block, count, causal, window, first, scale, dropout, seed):
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty((*q.shape[:3], 1), dtype=_accurate(q))


@torch.library.custom_op("thrifty::block_attention_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    output: Tensor,
    lse: Tensor,
    block: int,
    count: int,
    causal: bool,
    window: int,
    first: int,
    scale: float,
    dropout: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        work = lay_out_blocks(q, k, v, codes, mask, segments, block, VisibilityRule(causal, window, first), scale)
        grad_out, out, sums = (to_blocks(x, work) for x in (grad_output, output, lse))
        shared = (grad_out.to(sums.dtype) * out.to(sums.dtype)).sum(-1, keepdim=True)
        grad_q, grad_k, grad_v = torch.zeros_like(work.q), _sums(work.k), _sums(work.v)
        for chunk in chunks(work):
            n = len(chunk.keys)
            probability = chunk.scores.sub_(sums[chunk.rows]).exp_()
            upstream = grad_out.index_select(0, chunk.rows)
            values = work.v.index_select(0, chunk.keys).view(len(chunk.rows), -1, v.shape[-1])
            grad_scores = torch.bmm(upstream, values.transpose(1, 2)).to(sums.dtype)
            del values
            used = probability
            if seed is not None:
                factors = dropout_of(work, chunk, dropout, seed)
                used, grad_scores = probability * factors, grad_scores.mul_(factors)
            _add(grad_v, chunk.keys, torch.bmm(used.to(v.dtype).transpose(1, 2), upstream).view(n, block, -1))
            grad_scores = grad_scores.sub_(shared[chunk.rows]).mul_(probability).mul_(scale).to(q.dtype)
            keys = work.k.index_select(0, chunk.keys).view(len(chunk.rows), -1, k.shape[-1])
            grad_q[chunk.rows] = torch.bmm(grad_scores, keys)
            queries = work.q.index_select(0, chunk.rows)
            _add(grad_k, chunk.keys, torch.bmm(grad_scores.transpose(1, 2), queries).view(n, block, -1))
        keys, values = (
            x.to(like.dtype).view(*like.shape[:2], -1, x.shape[-1]) for x, like in ((grad_k, k), (grad_v, v))
        )
        s = k.shape[2]
        return from_blocks(grad_q, work), keys[:, :, :s].contiguous(), values[:, :, :s].contiguous()


@_attention_backward.register_fake
def _(grad_output, q, k, v, codes, mask, segments, output, lse, *rest):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _accurate(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _sums(x: Tensor) -> Tensor:
    """Return zeros like x, in float32 or wider, to sum many gradients of blocks."""
    return torch.zeros_like(x, dtype=_accurate(x))


def _add(sums: Tensor, places: Tensor, terms: Tensor) -> None:
    sums.index_add_(0, places, terms.to(sums.dtype))


def _keep_for_backward(ctx, inputs, output) -> None:
    q, k, v, codes, mask, segments, *ctx.numbers, seed = inputs
    ctx.save_for_backward(q, k, v, codes, mask, segments, *output, seed)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_output: Tensor, grad_lse: Tensor | None):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError("sparse attention has no second derivative", fix="use torch's attention with a mask")
    *tensors, seed = ctx.saved_tensors
    gradients = torch.ops.thrifty.block_attention_backward(grad_output.contiguous(), *tensors, *ctx.numbers, seed)
    return *gradients, *[None] * 11


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _flops(q: Tensor, v: Tensor, block: int, count: int, of_keys: int, of_values: int) -> int:
    """Return the FLOPs of matmuls of keys and of values over the kept blocks of all heads and examples."""
    return 2 * q.shape[0] * q.shape[1] * count * block**2 * (of_keys * q.shape[-1] + of_values * v.shape[-1])


FLOPS_OF[torch.ops.thrifty.block_attention] = lambda q, k, v, codes, mask, segments, block, count, *rest, **others: (
    _flops(q, v, block, count, 1, 1)
)
FLOPS_OF[torch.ops.thrifty.block_attention_backward] = (
    lambda grad_output, q, k, v, codes, mask, segments, output, lse, block, count, *rest, **others: _flops(
        q, v, block, count, 3, 2
    )
)
