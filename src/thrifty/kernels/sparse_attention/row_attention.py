"""Attention over single kept pairs: so many keys for every query.

Scores are computed at kept pairs alone, head by head, by the sparse products of `kernels/sparse/csr_matrix.py`, in
compiled
code where there is a compiler. Held for the backward pass are inputs, output, one number a query, and which pairs are
kept. A kept pair costs many times what one in a block does, in time and on the way also in memory: at density 1/8 this
takes as long as attention to everything, or longer. It is for the patterns of hardware and for lower densities.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.op_flops import FLOPS_OF
from thrifty.kernels.autocast_inputs import cast_for_autocast
from thrifty.kernels.sparse.csr_matrix import CsrMatrix
from thrifty.kernels.sparse.sparsity_pattern import rows_of


def row_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float | None = None) -> Tensor:
    """Attention of q (b, h, t, k) over those of k and v (b, g, s, k) that `keys` int64 (b or 1, h or 1, t, m) numbers
    for each query, no number twice; -1 stands for none. Raises UsageError for a key that is not there."""
    if keys.dtype != torch.int64 or keys.ndim != 4:
        raise UsageError(f"kept keys are {keys.dtype} of {tuple(keys.shape)}", fix="give int64 (b or 1, h or 1, t, m)")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.thrifty.row_attention(*cast_for_autocast(q, k, v), keys, scale)[0]


def csr_of_rows(keys: Tensor, count: int) -> CsrMatrix:
    """The pattern (t, count) that keeps, of each row, the columns `keys` (t, m) int64; -1 stands for none."""
    rows = keys.shape[0]
    sorted_keys = keys.sort(-1).values
    kept = sorted_keys >= 0
    columns = sorted_keys[kept]
    own_rows = torch.arange(rows, device=keys.device).repeat_interleave(kept.sum(-1))
    order = columns.argsort(stable=True)
    per_column = torch.bincount(columns, minlength=count)
    if len(per_column) > count:
        raise UsageError(
            f"key {len(per_column) - 1} is to be kept of {count}", fix=f"number keys from 0 to {count - 1}"
        )
    by_rows = F.pad(kept.sum(-1).cumsum(0), (1, 0)), columns.int(), own_rows * count + columns
    return CsrMatrix((rows, count), *by_rows, order, F.pad(per_column.cumsum(0), (1, 0)), own_rows[order].int())


def _heads(q: Tensor, k: Tensor, keep: Tensor):
    """Of each example and head: its numbers, those of its keys' head, and its pattern."""
    b, h, shared = q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    patterns: dict[tuple[int, int], CsrMatrix] = {}
    for i in range(b):
        for j in range(h):
            at = (i % keep.shape[0], j % keep.shape[1])
            if at not in patterns:
                patterns.clear()  # one at a time, unless all share it
                patterns[at] = csr_of_rows(keep[at], k.shape[2])
            yield (i, j), (i, j // shared), patterns[at]


def _scores(q: Tensor, k: Tensor, pattern: CsrMatrix, scale: float) -> Tensor:
    """(nnz,) in float32 at least."""
    return pattern.sddmm(q.T, k.T).mul_(scale)


def _by_row(values: Tensor, starts: Tensor, reduce: str, empty: float) -> Tensor:
    """The largest or the sum of each row's numbers; `empty` for a row without any."""
    return torch.segment_reduce(values, reduce, offsets=starts, initial=empty)


@torch.library.custom_op("thrifty::row_attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of each query's scores (b, h, t), 0 where nothing is kept."""
    accurate = torch.promote_types(q.dtype, torch.float32)
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_zeros(q.shape[:3], dtype=accurate)
    with torch.autocast(q.device.type, enabled=False):
        for at, of_keys, pattern in _heads(q, k, keep):
            row = rows_of(pattern.starts)
            scores = _scores(q[at].to(accurate), k[of_keys].to(accurate), pattern, scale)
            largest = _by_row(scores, pattern.starts, "max", torch.finfo(accurate).min)
            probability = scores.sub_(largest[row]).exp_()
            total = _by_row(probability, pattern.starts, "sum", 0.0)
            probability /= total[row]
            output[at] = pattern.spmm(v[of_keys].to(accurate).T, probability).T
            lse[at] = torch.where(total > 0, largest + total.log(), 0.0)
    return output, lse


@_attention.register_fake
def _(q, k, v, keep, scale):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@torch.library.custom_op("thrifty::row_attention_backward", mutates_args=())
def _attention_backward(
    of_output: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, output: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    accurate = lse.dtype
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=accurate, memory_format=torch.contiguous_format) for x in (q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        for at, of_keys, pattern in _heads(q, k, keep):
            row = rows_of(pattern.starts)
            queries, keys, values, upstream = (x.to(accurate) for x in (q[at], k[of_keys], v[of_keys], of_output[at]))
            probability = _scores(queries, keys, pattern, scale).sub_(lse[at][row]).exp_()
            shared = (upstream * output[at].to(accurate)).sum(-1)
            of_scores = pattern.sddmm(upstream.T, values.T).sub_(shared[row]).mul_(probability).mul_(scale)
            of_v[of_keys] += pattern.spmm_turned(upstream.T, pattern.turn(probability)).T
            of_k[of_keys] += pattern.spmm_turned(queries.T, pattern.turn(of_scores)).T
            of_q[at] = pattern.spmm(keys.T, of_scores).T
    # a kernel gives tensors of its own: the sums themselves where their dtype is right
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


@_attention_backward.register_fake
def _(of_output, q, k, v, keep, output, lse, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, of_output: Tensor, of_lse: Tensor | None):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError("sparse attention has no second derivative", fix="use torch's attention, under a mask")
    saved = ctx.saved_tensors
    return *torch.ops.thrifty.row_attention_backward(of_output.contiguous(), *saved, ctx.scale), None, None


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _flops(q: Tensor, keep: Tensor, products: int) -> int:
    return 2 * products * q.numel() * keep.shape[-1]


FLOPS_OF[torch.ops.thrifty.row_attention] = lambda q, k, v, keep, *rest, **others: _flops(q, keep, 2)
FLOPS_OF[torch.ops.thrifty.row_attention_backward] = lambda of_output, q, k, v, keep, *rest, **others: _flops(
    q, keep, 5
)
