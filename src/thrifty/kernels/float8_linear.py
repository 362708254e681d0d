"""Linear layer whose three matmuls (one forward, two backward) are in FP8.

For the backward pass, a layer saves only its FP8 input (a quarter of the float32 size), and only if the weight is
trained.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from thrifty.kernels import float8

INPUT, WEIGHT, GRADIENT = range(3)
"""Tensors that a layer casts to FP8, in the order of its scales."""


@dataclass(frozen=True)
class CastRule:
    """Rule for the scales of casts to FP8."""

    rows: bool = False
    """True for one scale per row of each matmul operand instead of one per tensor."""
    margin: int = 0
    """Number of powers of two left free above the largest magnitude."""
    powers_of_two: bool = False
    gradients: float8.Float8Format = float8.E5M2
    emulated: bool = True
    """True if matmuls use the reference instead of FP8 hardware."""

    def format(self, role: int) -> float8.Float8Format:
        return self.gradients if role == GRADIENT else float8.E4M3

    def scale(self, amax: Tensor, role: int, old: Tensor | float = 1.0) -> Tensor:
        return float8.scale_from_amax(amax, self.format(role), old, self.margin, self.powers_of_two)


@dataclass
class DelayedScaling:
    """Scales computed from earlier steps (delayed scaling). Scales and magnitudes start at 0. While a scale is 0, casts
    compute the scale from the current tensor instead.
    """

    scales: Tensor
    """Scales (3,) of input, weight and gradient. 0 if there is no scale yet."""
    seen: Tensor
    """Largest magnitudes (3,) of this step so far. Only backward passes update them, so recomputed forward passes and
    forward passes without gradients have no effect.
    """


@torch.no_grad()
def next_scales(
    histories: Tensor, scales: Tensor, seen: Tensor, casting: CastRule, most_recent: bool = False
) -> tuple[Tensor, Tensor]:
    """Return histories (…, 3, h) and scales (…, 3) after a step whose largest magnitudes were `seen` (…, 3). A scale is
    computed from the largest magnitude of its history, or with `most_recent` from the newest magnitude. If that
    magnitude is 0 or not finite, the scale is unchanged.
    """
    histories = float8.update_amax_history(histories, seen)
    amax = histories[..., 0] if most_recent else histories.amax(-1)
    roles = [casting.scale(amax[..., role], role, scales[..., role]) for role in (INPUT, WEIGHT, GRADIENT)]
    return histories, torch.stack(roles, -1)


def float8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, casting: CastRule, delayed: DelayedScaling | None = None
) -> Tensor:
    """Return x (…, k) times the transpose of weight (n, k), plus the bias in high precision, in the dtype that
    `F.linear` would return.

    Scales are computed from the current tensors unless `delayed` is passed.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    result = _Float8Product.apply(x.reshape(-1, x.shape[-1]), weight, casting, delayed, dtype)
    if bias is not None:
        result = result + bias.to(dtype)
    return result.view(*x.shape[:-1], weight.shape[0])


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, casting, delayed, dtype):  # type: ignore[override]
        ctx.casting, ctx.delayed, ctx.dtypes = casting, delayed, (x.dtype, weight.dtype)
        x_codes, x_scale, x_amax = quantize_operand(x, INPUT, 1, casting, delayed)
        w_codes, w_scale, w_amax = quantize_operand(weight, WEIGHT, 1, casting, delayed)
        result = _multiply(casting, x_codes, x_scale, *_transposed(w_codes, w_scale), dtype, fast=True)
        if casting.rows and ctx.needs_input_grad[1]:  # the matmul of the weight gradient sums along the other dim
            x_codes, x_scale, _ = quantize_operand(x, INPUT, 0, casting)
        # saved as plain bytes, so that activation stores do not compress them
        kept = x_codes.view(torch.uint8) if ctx.needs_input_grad[1] else None
        noted = () if delayed is None else (x_amax, w_amax)
        ctx.save_for_backward(kept, x_scale, weight if ctx.needs_input_grad[0] else None, w_scale, *noted)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[override]
        casting: CastRule = ctx.casting
        x_codes, x_scale, weight, w_scale, *noted = ctx.saved_tensors
        grad_x, grad_weight = None, None
        codes, scale, amax = quantize_operand(gradient, GRADIENT, 1, casting, ctx.delayed)
        if ctx.delayed is not None:
            seen = ctx.delayed.seen
            seen.copy_(torch.maximum(seen, torch.stack([*noted, amax])))
        if weight is not None:
            if casting.rows:
                w_codes, w_scale, _ = quantize_operand(weight, WEIGHT, 0, casting)
            else:  # cast again instead of saved, because the weight is in memory anyway
                w_codes = float8.cast_float8(weight, w_scale, casting.format(WEIGHT))
            grad_x = _multiply(casting, codes, scale, w_codes, w_scale, ctx.dtypes[0])
        if x_codes is not None:
            if casting.rows:
                codes, scale, _ = quantize_operand(gradient, GRADIENT, 0, casting)
            x_codes = x_codes.view(casting.format(INPUT).dtype)
            grad_weight = _multiply(casting, *_transposed(codes, scale), x_codes, x_scale, ctx.dtypes[1])
        return grad_x, grad_weight, None, None, None


def quantize_operand(
    numbers: Tensor, role: int, dim: int, casting: CastRule, delayed: DelayedScaling | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an FP8 matrix (n, k), its scale and its largest magnitude, for a matmul that sums along `dim`."""
    amax = float8.amax_of(numbers, dim if casting.rows else None)
    scale = casting.scale(amax, role)
    if delayed is not None:
        known = delayed.scales[role]
        scale = torch.where(known > 0, known, scale)
    return float8.cast_float8(numbers, scale, casting.format(role)), scale, amax


def _transposed(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return codes.T, scale.T if scale.ndim else scale


def _multiply(casting: CastRule, *factors: Any, fast: bool = False) -> Tensor:
    return float8.scaled_matmul_reference(*factors) if casting.emulated else float8.scaled_matmul(*factors, fast=fast)
