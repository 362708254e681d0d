"""Linear layer with a sparse weight S, y = x Sᵀ. The gradient of x is an SpMM, and the gradient of the kept values is
an SDDMM.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thrifty.kernels.sparse.sparsity_pattern import SparsityPattern


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pattern: SparsityPattern, dense_gradient: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pattern, ctx.dense_gradient = pattern, dense_gradient
        return pattern.spmm(x, pattern.pick(weight).to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), pattern = ctx.saved_tensors, ctx.pattern
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = pattern.spmm_turned(upstream, pattern.turn(pattern.pick(weight)).to(x.dtype))
        if ctx.needs_input_grad[1]:
            dense = ctx.dense_gradient
            grad_weight = upstream.T @ x if dense else pattern.place(pattern.sddmm(upstream, x))
            grad_weight = grad_weight.to(weight.dtype)
        return grad_x, grad_weight, upstream.sum(0) if ctx.needs_input_grad[2] else None, None, None


def sparse_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, pattern: SparsityPattern, dense_gradient: bool = False
) -> Tensor:
    """Return `F.linear` for x (..., k) and a weight (m, k) that is zero outside the pattern.

    The weight gradient is a dense tensor. It is zero outside the pattern, or exact everywhere with `dense_gradient`,
    which growth criteria require. Matmuls run in float32 or wider; the result has the dtype that `F.linear` would
    return.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(-1, x.shape[-1]).to(wide)
    wide_bias = None if bias is None else bias.to(wide)
    with torch.autocast(device, enabled=False):
        y = _SparseLinear.apply(rows, weight, wide_bias, pattern, dense_gradient)
    return y.to(dtype).view(*x.shape[:-1], len(weight))
