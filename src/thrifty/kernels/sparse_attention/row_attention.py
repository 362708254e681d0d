"""Attention over single kept pairs, with the same number of keys for every query.

Scores are computed only at kept pairs, head by head, by the sparse matmuls of `kernels/sparse/csr_matrix.py`, in
compiled code if there is a compiler. The backward pass saves inputs, output, one value per query, and the kept pairs. A
single kept pair costs many times more time and temporary memory than a pair in a block. At density 1/8 this attention
is at best as fast as dense attention. Use it for hardware sparsity patterns and for lower densities.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.core.op_flops import FLOPS_OF
from thrifty.kernels.attention_dropout import draw_seed, dropout_factors
from thrifty.kernels.autocast_inputs import cast_for_autocast
from thrifty.kernels.sparse.csr_matrix import CsrMatrix
from thrifty.kernels.sparse.sparsity_pattern import rows_of


def row_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Return attention of q (b, h, t, k) over the kept keys and values of k and v (b, g, s, k). The output is as wide
    as the values.

    `keys` int64 (b or 1, h or 1, t, m) contains the indices of each query's kept keys, without duplicates; -1 means no
    key. Weights are dropped at the rate `dropout`. Raises UsageError if an index is out of range.
    """
    if keys.dtype != torch.int64 or keys.ndim != 4:
        raise UsageError(
            f"kept keys have dtype {str(keys.dtype)!r} and shape {tuple(keys.shape)}",
            fix="pass int64 of shape (b or 1, h or 1, t, m)",
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seed = draw_seed(q.device) if dropout else None
    return torch.ops.thrifty.row_attention(*cast_for_autocast(q, k, v), keys, scale, dropout, seed)[0]


def csr_of_rows(keys: Tensor, count: int) -> CsrMatrix:
    """Return the pattern (t, count) that keeps columns `keys` (t, m) int64 in each row; -1 means no column."""
    rows = keys.shape[0]
    sorted_keys = keys.sort(-1).values
    kept = sorted_keys >= 0
    columns = sorted_keys[kept]
    own_rows = torch.arange(rows, device=keys.device).repeat_interleave(kept.sum(-1))
    order = columns.argsort(stable=True)
    per_column = torch.bincount(columns, minlength=count)
    if len(per_column) > count:
        raise UsageError(
            f"kept key {len(per_column) - 1} does not exist: there are {count} keys",
            fix=f"use indices from 0 to {count - 1}",
        )
    by_rows = F.pad(kept.sum(-1).cumsum(0), (1, 0)), columns.int(), own_rows * count + columns
    return CsrMatrix((rows, count), *by_rows, order, F.pad(per_column.cumsum(0), (1, 0)), own_rows[order].int())


def _heads(q: Tensor, k: Tensor, keep: Tensor):
    """Yield for each example and head: its indices, the indices of its key head, and its pattern."""
    b, h, shared = q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    patterns: dict[tuple[int, int], CsrMatrix] = {}
    for i in range(b):
        for j in range(h):
            at = (i % keep.shape[0], j % keep.shape[1])
            if at not in patterns:
                patterns.clear()  # one pattern at a time, unless all heads share it
                patterns[at] = csr_of_rows(keep[at], k.shape[2])
            yield (i, j), (i, j // shared), patterns[at]


def _scores(q: Tensor, k: Tensor, pattern: CsrMatrix, scale: float) -> Tensor:
    """Return the scores (nnz,) in float32 or wider."""
    return pattern.sddmm(q.T, k.T).mul_(scale)


def _dropout_of(pattern: CsrMatrix, at: tuple[int, int], heads: int, rate: float, seed: Tensor) -> Tensor:
    """Return the factors (nnz,) of the weights of example and head `at`."""
    head = torch.tensor(at[0] * heads + at[1], device=seed.device)
    return dropout_factors(seed, rate, head, rows_of(pattern.starts).long(), pattern.columns.long())


def _by_row(values: Tensor, starts: Tensor, reduce: str, empty: float) -> Tensor:
    """Return the maximum or the sum of each row's elements. A row without elements returns `empty`."""
    return torch.segment_reduce(values, reduce, offsets=starts, initial=empty)


@torch.library.custom_op("thrifty::row_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float, dropout: float, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output (b, h, t, k), and the log-sum-exp of each query's scores (b, h, t), 0 if no key is kept."""
    accurate = torch.promote_types(q.dtype, torch.float32)
    output = q.new_zeros((*q.shape[:3], v.shape[-1]))
    lse = q.new_zeros(q.shape[:3], dtype=accurate)
    with torch.autocast(q.device.type, enabled=False):
        for at, key_head, pattern in _heads(q, k, keep):
            row = rows_of(pattern.starts)
            scores = _scores(q[at].to(accurate), k[key_head].to(accurate), pattern, scale)
            largest = _by_row(scores, pattern.starts, "max", torch.finfo(accurate).min)
            probability = scores.sub_(largest[row]).exp_()
            total = _by_row(probability, pattern.starts, "sum", 0.0)
            probability /= total[row]
            if seed is not None:
                probability *= _dropout_of(pattern, at, q.shape[1], dropout, seed)
            output[at] = pattern.spmm(v[key_head].to(accurate).T, probability).T
            lse[at] = torch.where(total > 0, largest + total.log(), 0.0)
    return output, lse


@_attention.register_fake
def _(q, k, v, keep, scale, dropout, seed):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[-1])), lse


@torch.library.custom_op("thrifty::row_attention_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, output: Tensor, lse: Tensor, scale: float,
    dropout: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    accurate = lse.dtype
    grad_q, grad_k, grad_v = (
        torch.zeros_like(x, dtype=accurate, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    with torch.autocast(q.device.type, enabled=False):
        for at, key_head, pattern in _heads(q, k, keep):
            row = rows_of(pattern.starts)
            queries, keys, values, upstream = (
                x.to(accurate) for x in (q[at], k[key_head], v[key_head], grad_output[at])
            )
            probability = _scores(queries, keys, pattern, scale).sub_(lse[at][row]).exp_()
            shared = (upstream * output[at].to(accurate)).sum(-1)
            factors = 1.0 if seed is None else _dropout_of(pattern, at, q.shape[1], dropout, seed)
            grad_scores = pattern.sddmm(upstream.T, values.T).mul_(factors).sub_(shared[row]).mul_(probability)
            grad_scores.mul_(scale)
            grad_v[key_head] += pattern.spmm_turned(upstream.T, pattern.turn(probability * factors)).T
            grad_k[key_head] += pattern.spmm_turned(queries.T, pattern.turn(grad_scores)).T
            grad_q[at] = pattern.spmm(keys.T, grad_scores).T
    # a custom operation must return new tensors; these are the sums, converted if their dtype differs
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


@_attention_backward.register_fake
def _(grad_output, q, k, v, keep, output, lse, scale, dropout, seed):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep_for_backward(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.dropout, seed = inputs
    ctx.save_for_backward(*tensors, *output, seed)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_output: Tensor, grad_lse: Tensor | None):
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError("sparse attention has no second derivative", fix="use torch's attention with a mask")
    *saved, seed = ctx.saved_tensors
    gradients = torch.ops.thrifty.row_attention_backward(grad_output.contiguous(), *saved, ctx.scale, ctx.dropout, seed)
    return *gradients, None, None, None, None


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _flops(q: Tensor, v: Tensor, keep: Tensor, of_keys: int, of_values: int) -> int:
    return 2 * q.shape[:3].numel() * keep.shape[-1] * (of_keys * q.shape[-1] + of_values * v.shape[-1])


FLOPS_OF[torch.ops.thrifty.row_attention] = lambda q, k, v, keep, *rest, **others: _flops(q, v, keep, 1, 1)
FLOPS_OF[torch.ops.thrifty.row_attention_backward] = lambda grad_output, q, k, v, keep, *rest, **others: _flops(
    q, v, keep, 3, 2
)
