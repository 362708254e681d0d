"""Numbers in 8 bits of floating point, each tensor or each row of it with a scale: casts, scales, products.

Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433). A code stands for a number times the scale.
E4M3 has a bit more of mantissa, E5M2 reaches seven powers of two further both ways, as gradients need.

A finite number beyond the largest becomes the largest. One that is not finite never becomes a number: libraries differ
there, some versions of torch give 448 for infinity, and a run that has exploded would go on unnoticed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16
"""What units for these products ask of the inner width of a product and of the width of its result."""


@dataclass(frozen=True)
class Float8Format:
    """One sign bit, an exponent, a mantissa; subnormal numbers below 2^least_exponent."""

    name: str
    dtype: torch.dtype
    mantissa_bits: int
    least_exponent: int
    """Of a normal number."""
    largest: float
    has_infinity: bool


E4M3 = Float8Format("e4m3", torch.float8_e4m3fn, 3, -6, 448.0, False)
E5M2 = Float8Format("e5m2", torch.float8_e5m2, 2, -14, 57344.0, True)
FORMATS = {format.name: format for format in (E4M3, E5M2)}


def amax_of(numbers: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude in float32: of all numbers (), or along one dim, which is kept with size 1. Anything that
    is no number makes it none; of no numbers at all it is 0."""
    if not numbers.numel():
        shape = [] if dim is None else [1 if axis == dim % numbers.ndim else n for axis, n in enumerate(numbers.shape)]
        return numbers.new_zeros(shape, dtype=torch.float32)
    low, high = torch.aminmax(numbers, dim=dim, keepdim=dim is not None)
    return torch.maximum(high, -low).float()


def scale_from_amax(
    amax: Tensor, format: Float8Format, old: Tensor | float = 1.0, margin: int = 0, powers_of_two: bool = False
) -> Tensor:
    """The scale by which `amax` becomes the format's largest number over 2^margin, shaped as `amax`, in float32.

    Where amax is 0 or not finite it is the old scale. It is finite and not 0 itself; `powers_of_two` rounds it down to
    one.
    """
    numbers = torch.finfo(torch.float32)
    # a number divided by a tensor would be its reciprocal times the number, rounded twice
    scale = (torch.full_like(amax, format.largest) / amax * 2.0**-margin).clamp(numbers.tiny, numbers.max)
    if powers_of_two:  # the exponent's bits alone
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, old)


def cast_float8(numbers: Tensor, scale: Tensor, format: Float8Format) -> Tensor:
    """The codes, in the format's dtype, of numbers times their scale, rounded to the nearest, ties to even."""
    scaled = numbers.float() * scale
    within = scaled.clamp(-format.largest, format.largest)
    lost = scaled if format.has_infinity else torch.nan
    return torch.where(numbers.isfinite(), within, lost).to(format.dtype)


def dequantize_float8(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers that codes stand for, in float32."""
    return codes.float() / scale


def has_units(device: torch.device) -> bool:
    """Whether a device multiplies these codes itself."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """The product (m, n) of codes (m, k) and (k, n) with scales () or (m, 1) and (1, n), on units made for it.

    Widths that are no multiples of 16 are filled up. `fast` adds up in fewer bits.
    """
    width, (inner, outer) = b.shape[1], (-size % MULTIPLE for size in b.shape)
    if inner or outer:
        a = F.pad(a.view(torch.uint8), (0, inner)).view(a.dtype)
        b = F.pad(b.view(torch.uint8), (0, outer, 0, inner)).view(b.dtype)
        b_scale = F.pad(b_scale, (0, outer), value=1.0) if b_scale.ndim else b_scale
    a, b = a.contiguous(), b.T.contiguous().T  # the layout that the units read
    undo_a, undo_b = a_scale.reciprocal(), b_scale.reciprocal()
    if not a_scale.ndim:
        product = torch._scaled_mm(a, b, undo_a, undo_b, out_dtype=dtype, use_fast_accum=fast)
    else:  # kernels with scales of rows take fewer formats and give fewer dtypes
        one = undo_a.new_ones(())
        product = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast) * undo_a * undo_b
    return _as(product[:, :width].contiguous() if outer else product, dtype)


def scaled_matmul_reference(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The same in float32 from the numbers that the codes stand for, on any device."""
    with torch.autocast(a.device.type, enabled=False):
        return _as(dequantize_float8(a, a_scale) @ dequantize_float8(b, b_scale), dtype)


def _as(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Converted only where that is called for: a conversion of a tensor to what it is, last in an autograd function, is
    compiled by torch 2.11 to gradients of zero."""
    return product if product.dtype == dtype else product.to(dtype)


def update_amax_history(history: Tensor, amax: Tensor) -> Tensor:
    """A history (…, h), newest first, with a new amax (…); one that is not finite counts as none, 0: for as long as it
    stood in the history there would be no scale."""
    newest = torch.where(amax.isfinite(), amax, 0.0)
    return torch.cat([newest[..., None], history[..., :-1]], -1)
