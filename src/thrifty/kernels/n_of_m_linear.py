"""Linear layer with an N:M masked weight in the forward pass, and a straight-through gradient for the whole weight.

    forward   y = x (W ⊙ mask)ᵀ        sparse along the summed dim
    backward  dx = dy (W ⊙ mask)       sparse if the mask is transposable
              dW = dyᵀ x               sparse if a sparse estimate replaces dy

A GPU with hardware for 2:4 sparse matmuls uses this hardware. Other devices compute dense matmuls of the same values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.sparse import to_sparse_semi_structured

from thrifty.kernels.n_of_m_masks import NOfMPattern, unbiased_estimate

SIXTEEN_BITS = (torch.float16, torch.bfloat16)
ROWS, COLUMNS = 32, 64
"""Numbers that divide the rows and columns of every 16-bit matrix that all torch backends can pack."""


@dataclass(frozen=True)
class NOfMProducts:
    pattern: NOfMPattern
    estimate: bool = False
    """True if the weight gradient uses an unbiased N:M estimate of the output gradient."""
    on_units: bool = False
    """True if 16-bit 2:4 sparse matmuls run on the device's sparse hardware."""

    def go_to_units(self, matrix: Tensor) -> bool:
        fits = matrix.shape[0] % ROWS == 0 and matrix.shape[1] % COLUMNS == 0
        # packed matrices are a tensor subclass, which torch.compile may not support
        return self.on_units and fits and matrix.dtype in SIXTEEN_BITS and not torch.compiler.is_compiling()


def has_sparse_units(device: torch.device, pattern: NOfMPattern) -> bool:
    """Return True if a device multiplies matrices with this pattern faster than dense matrices."""
    is_two_of_four = (pattern.n, pattern.m) == (2, 4)
    return is_two_of_four and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def masked_linear(x: Tensor, weight: Tensor, mask: Tensor, bias: Tensor | None, products: NOfMProducts) -> Tensor:
    """Return x (…, in) times the transpose of (weight · mask), plus the bias, in the dtype that `F.linear` would
    return. weight and mask are (out, in). The weight gradient is the gradient of the masked weight, also at masked
    positions.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    result = _MaskedProduct.apply(x.reshape(-1, x.shape[-1]), weight, mask, bias, products, dtype)
    return result.view(*x.shape[:-1], weight.shape[0])


class _MaskedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, mask, bias, products, dtype):  # type: ignore[override]
        ctx.products, ctx.dtypes = products, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        x, masked = x.to(dtype), (weight * mask).to(dtype)
        # masked again instead of saved, because weight and mask are in memory anyway
        saved = (weight, mask) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, *saved)
        return _times_transposed(x, masked, products, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[override]
        products: NOfMProducts = ctx.products
        x, weight, mask = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        grad_x, grad_weight, grad_bias = None, None, None
        if ctx.needs_input_grad[0]:
            masked = (weight * mask).to(gradient.dtype)
            on_units = products.pattern.transposable and products.go_to_units(masked.T)
            grad_x = _times_transposed(gradient, masked.T, products) if on_units else gradient @ masked
            grad_x = grad_x.to(x_dtype)
        if ctx.needs_input_grad[1]:
            outputs = gradient.T
            if products.estimate:  # sparse along tokens, the dim that this matmul sums
                outputs = unbiased_estimate(gradient, products.pattern.n, products.pattern.m, dim=0).T
                if products.go_to_units(outputs):
                    outputs = to_sparse_semi_structured(outputs.contiguous())
            grad_weight = (outputs @ x.contiguous()).to(weight_dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = gradient.sum(0).to(bias_dtype)
        return grad_x, grad_weight, None, grad_bias, None, None


def _times_transposed(x: Tensor, matrix: Tensor, products: NOfMProducts, bias: Tensor | None = None) -> Tensor:
    """Return x (n, k) times the transpose of a matrix (m, k) with sparse rows, plus a bias."""
    if products.go_to_units(matrix):
        # the hardware requires contiguous operands, and returns transposed results, which attention does not accept
        return F.linear(x.contiguous(), to_sparse_semi_structured(matrix.contiguous()), bias).contiguous()
    return F.linear(x, matrix, bias)
