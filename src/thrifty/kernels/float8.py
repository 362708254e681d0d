"""FP8 tensors with a scale per tensor or per row: casts, scales, products.

Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433). An FP8 element stores the original value
times the scale. E4M3 has one more mantissa bit; E5M2 reaches seven powers of two further in both directions, as
gradients require.

A finite value beyond the largest becomes the largest. A non-finite value never becomes finite. Libraries differ there:
some versions of torch return 448 for infinity, so that a diverged run would continue unnoticed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MULTIPLE = 16
"""Multiple that FP8 hardware requires of the inner and the outer width of a product."""


@dataclass(frozen=True)
class Float8Format:
    """A format of one sign bit, an exponent and a mantissa; subnormal below 2^least_exponent."""

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
    """Return the largest magnitude in float32: of all elements (), or along one dim, which is kept with size 1.

    NaN in the input makes the result NaN; an empty input gives 0.
    """
    if not numbers.numel():
        shape = [] if dim is None else [1 if axis == dim % numbers.ndim else n for axis, n in enumerate(numbers.shape)]
        return numbers.new_zeros(shape, dtype=torch.float32)
    low, high = torch.aminmax(numbers, dim=dim, keepdim=dim is not None)
    return torch.maximum(high, -low).float()


def scale_from_amax(
    amax: Tensor, format: Float8Format, old: Tensor | float = 1.0, margin: int = 0, powers_of_two: bool = False
) -> Tensor:
    """Return the scale that maps `amax` to the format's largest number over 2^margin, in the shape of `amax`, in
    float32.

    If amax is 0 or not finite, the old scale is returned. The scale itself is finite and nonzero; `powers_of_two`
    rounds it down to a power of two.
    """
    numbers = torch.finfo(torch.float32)
    # a Python number divided by a tensor would be rounded twice: reciprocal, then product
    scale = (torch.full_like(amax, format.largest) / amax * 2.0**-margin).clamp(numbers.tiny, numbers.max)
    if powers_of_two:  # keep only the bits of the exponent
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & amax.isfinite(), scale, old)


def cast_float8(numbers: Tensor, scale: Tensor, format: Float8Format) -> Tensor:
    """Return elements times their scale in the format's dtype and the same shape, rounded to nearest, ties to even."""
    scaled = numbers.float() * scale
    within = scaled.clamp(-format.largest, format.largest)
    lost = scaled if format.has_infinity else torch.nan
    return torch.where(numbers.isfinite(), within, lost).to(format.dtype)


def dequantize_float8(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the float32 values of FP8 elements, in their shape."""
    return codes.float() / scale


def has_units(device: torch.device) -> bool:
    """Return True if a device multiplies FP8 matrices in hardware."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def scaled_matmul(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """Return the FP8 product (m, n) of (m, k) and (k, n) with scales () or (m, 1) and (1, n), in hardware.

    Widths that are no multiples of 16 are padded. `fast` accumulates in fewer bits.
    """
    width, (inner, outer) = b.shape[1], (-size % MULTIPLE for size in b.shape)
    if inner or outer:
        a = F.pad(a.view(torch.uint8), (0, inner)).view(a.dtype)
        b = F.pad(b.view(torch.uint8), (0, outer, 0, inner)).view(b.dtype)
        b_scale = F.pad(b_scale, (0, outer), value=1.0) if b_scale.ndim else b_scale
    a, b = a.contiguous(), b.T.contiguous().T  # the layout that the hardware requires
    undo_a, undo_b = a_scale.reciprocal(), b_scale.reciprocal()
    if not a_scale.ndim:
        product = torch._scaled_mm(a, b, undo_a, undo_b, out_dtype=dtype, use_fast_accum=fast)
    else:  # kernels with row scales support fewer formats and dtypes
        one = undo_a.new_ones(())
        product = torch._scaled_mm(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast) * undo_a * undo_b
    return _as(product[:, :width].contiguous() if outer else product, dtype)


def scaled_matmul_reference(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same product (m, n) in float32 from dequantized values, on any device."""
    with torch.autocast(a.device.type, enabled=False):
        return _as(dequantize_float8(a, a_scale) @ dequantize_float8(b, b_scale), dtype)


def _as(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in a dtype, converted only if necessary.

    torch 2.11 compiles a conversion to the same dtype, last in an autograd function, to gradients of zero.
    """
    return product if product.dtype == dtype else product.to(dtype)


def update_amax_history(history: Tensor, amax: Tensor) -> Tensor:
    """Return a history (…, h), newest first, with a new amax (…); a non-finite one becomes 0.

    A non-finite amax would prevent a scale for as long as it stays in the history.
    """
    newest = torch.where(amax.isfinite(), amax, 0.0)
    return torch.cat([newest[..., None], history[..., :-1]], -1)
