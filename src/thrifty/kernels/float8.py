"""FP8 tensors with a scale per tensor or per row: casts, scales, matmuls.

Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433). An FP8 element stores the original value
times the scale. E4M3 has one mantissa bit more than E5M2. E5M2 reaches seven powers of two further than E4M3 in both
directions; gradients require this range.

A finite value beyond the largest FP8 value becomes the largest FP8 value. A non-finite value never becomes finite.
Libraries differ for infinity: some torch versions return 448, which would hide the divergence of a run.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16
"""Multiple that FP8 hardware requires of the inner and outer dims of a matmul."""


@dataclass(frozen=True)
class Float8Format:
    """FP8 format: one sign bit, an exponent and a mantissa. Numbers below 2^least_exponent are subnormal."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    least_exponent: int
    """Smallest exponent of a normal number."""
    largest: float
    has_infinity: bool


E4M3 = Float8Format("e4m3", torch.float8_e4m3fn, 3, -6, 448.0, False)
E5M2 = Float8Format("e5m2", torch.float8_e5m2, 2, -14, 57344.0, True)
FORMATS = {format.name: format for format in (E4M3, E5M2)}


def amax_of(numbers: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest magnitude in float32: a scalar () over all elements, or maxima along `dim`, which keeps size
    1.

    If an element is NaN, the result is NaN. For an empty tensor the result is 0.
    """
    if not numbers.numel():
        shape = [] if dim is None else [1 if axis == dim % numbers.ndim else n for axis, n in enumerate(numbers.shape)]
        return numbers.new_zeros(shape, dtype=torch.float32)
    low, high = torch.aminmax(numbers, dim=dim, keepdim=dim is not None)
    return torch.maximum(high, -low).float()


def scale_from_amax(
    amax: Tensor, format: Float8Format, old: Tensor | float = 1.0, margin: int = 0, powers_of_two: bool = False
) -> Tensor:
    """Return the scale that maps `amax` to the format's largest number divided by 2^margin, in the shape of `amax`, in
    float32.

    If amax is 0 or not finite, the old scale is returned. The scale is finite and nonzero. With `powers_of_two` it is
    rounded down to a power of two.
    """
    numbers = torch.finfo(torch.float32)
    # a Python number divided by a tensor would be rounded twice (reciprocal, then product)
    scale = (torch.full_like(amax, format.largest) / amax * 2.0**-margin).clamp(numbers.tiny, numbers.max)
    if powers_of_two:  # keep only the bits of the exponent
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, old)


def cast_float8(numbers: Tensor, scale: Tensor, format: Float8Format) -> Tensor:
    """Return elements times their scale, in the format's dtype and unchanged shape, rounded to nearest even."""
    scaled = numbers.float() * scale
    within = scaled.clamp(-format.largest, format.largest)
    lost = scaled if format.has_infinity else torch.nan
    return torch.where(numbers.isfinite(), within, lost).to(format.dtype)


def dequantize_float8(codes: Tensor, scale: Tensor) -> Tensor:
    """Return FP8 elements divided by their scale, as float32 values in unchanged shape."""
    return codes.float() / scale


def has_units(device: torch.device) -> bool:
    """Return True if a device has hardware for FP8 matmuls."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Return the product (m, n) of FP8 matrices a (m, k) and b (k, n), computed in hardware. Both scales are (), or
    they are (m, 1) and (1, n).

    Dims that are not multiples of 16 are padded. `fast` accumulates with fewer bits.
    """
    width, (inner, outer) = b.shape[1], (-size % MULTIPLE for size in b.shape)
    if inner or outer:
        a = F.pad(a.view(torch.uint8), (0, inner)).view(a.dtype)
        b = F.pad(b.view(torch.uint8), (0, outer, 0, inner)).view(b.dtype)
        b_scale = F.pad(b_scale, (0, outer), value=1.0) if b_scale.ndim else b_scale
    a, b = a.contiguous(), b.T.contiguous().T  # the memory layout that the hardware requires
    undo_a, undo_b = a_scale.reciprocal(), b_scale.reciprocal()
    if not a_scale.ndim:
        product = torch._scaled_mm(a, b, undo_a, undo_b, out_dtype=dtype, use_fast_accum=fast)
    else:  # kernels with row scales support fewer formats and dtypes
        one = undo_a.new_ones(())
        product = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast) * undo_a * undo_b
    return _as(product[:, :width].contiguous() if outer else product, dtype)


def scaled_matmul_reference(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product (m, n) of `scaled_matmul`, computed in float32 from dequantized values, on any device."""
    with torch.autocast(a.device.type, enabled=False):
        return _as(dequantize_float8(a, a_scale) @ dequantize_float8(b, b_scale), dtype)


def _as(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matmul result in a dtype, converted only if necessary.

    torch 2.11 has a bug: a conversion to the same dtype at the end of an autograd function is compiled to zero
    gradients.
    """
    return product if product.dtype == dtype else product.to(dtype)


def update_amax_history(history: Tensor, amax: Tensor) -> Tensor:
    """Return a history (…, h), newest first, with the new amax (…) added. A non-finite amax is stored as 0, because it
    would prevent a valid scale while it stays in the history.
    """
    newest = torch.where(amax.isfinite(), amax, 0.0)
    return torch.cat([newest[..., None], history[..., :-1]], -1)
