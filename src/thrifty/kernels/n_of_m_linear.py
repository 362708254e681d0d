"""A linear layer whose weight is masked in the forward pass and trained whole: the gradient goes straight through.

    forward   y = x (W ⊙ mask)ᵀ        sparse along what is summed over
    backward  dx = dy (W ⊙ mask)       sparse where the mask is transposable
              dW = dyᵀ x               sparse where dy is replaced by an estimate that is

On a GPU with units for 2:4 sparse products these are made there; elsewhere by dense products of the same numbers.
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
"""What a matrix of 16-bit numbers must be multiples of to be packed by any of torch's backends."""


@dataclass(frozen=True)
class NOfMProducts:
    """How the products of a layer are made."""

    pattern: NOfMPattern
    estimate: bool = False
    """Whether the weight's gradient is made of an unbiased N:M estimate of the output's."""
    on_units: bool = False
    """Whether 2:4 sparse products in 16 bits go to the device's units."""

    def go_to_units(self, matrix: Tensor) -> bool:
        fits = matrix.shape[0] % ROWS == 0 and matrix.shape[1] % COLUMNS == 0
        # packed matrices are tensors of a class of their own, which a compiler need not see through
        return self.on_units and fits and matrix.dtype in SIXTEEN_BITS and not torch.compiler.is_compiling()


def has_sparse_units(device: torch.device, pattern: NOfMPattern) -> bool:
    """Whether a device multiplies by matrices of this pattern faster than by dense ones."""
    is_two_of_four = (pattern.n, pattern.m) == (2, 4)
    return is_two_of_four and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def masked_linear(x: Tensor, weight: Tensor, mask: Tensor, bias: Tensor | None, products: NOfMProducts) -> Tensor:
    """x (…, in) times weight (out, in) under a mask of its shape, plus the bias, in the dtype that `F.linear` would
    give here. The weight's gradient is that of the masked weight, at masked places too."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    result = _MaskedProduct.apply(x.reshape(-1, x.shape[-1]), weight, mask, bias, products, dtype)
    return result.view(*x.shape[:-1], weight.shape[0])


class _MaskedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, mask, bias, products, dtype):  # type: ignore[override]
        ctx.products, ctx.dtypes = products, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        x, masked = x.to(dtype), (weight * mask).to(dtype)
        # masked again rather than kept: weight and mask are there anyway
        of_x = (weight, mask) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, *of_x)
        return _times_turned(x, masked, products, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[override]
        products: NOfMProducts = ctx.products
        x, weight, mask = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        of_x, of_weight, of_bias = None, None, None
        if ctx.needs_input_grad[0]:
            masked = (weight * mask).to(gradient.dtype)
            turned = products.pattern.transposable and products.go_to_units(masked.T)
            of_x = _times_turned(gradient, masked.T, products) if turned else gradient @ masked
            of_x = of_x.to(x_dtype)
        if ctx.needs_input_grad[1]:
            outputs = gradient.T
            if products.estimate:  # sparse along tokens, over which this product sums
                outputs = unbiased_estimate(gradient, products.pattern.n, products.pattern.m, dim=0).T
                if products.go_to_units(outputs):
                    outputs = to_sparse_semi_structured(outputs.contiguous())
            of_weight = (outputs @ x.contiguous()).to(weight_dtype)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.sum(0).to(bias_dtype)
        return of_x, of_weight, None, of_bias, None, None


def _times_turned(x: Tensor, matrix: Tensor, products: NOfMProducts, bias: Tensor | None = None) -> Tensor:
    """x (n, k) times the transpose of a matrix (m, k) whose rows are sparse, plus a bias."""
    if products.go_to_units(matrix):
        # units take no factor whose rows lie apart, and give results the other way round, which attention does not take
        return F.linear(x.contiguous(), to_sparse_semi_structured(matrix.contiguous()), bias).contiguous()
    return F.linear(x, matrix, bias)
