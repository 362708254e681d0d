"""Compiled C++ versions of the functions of `groupwise_quantization.py`, for lines of elements on a CPU."""

import torch
from torch import Tensor

from thrifty.kernels import groupwise_quantization_cpp
from thrifty.kernels.cpp_extension import NativeLibrary

CODES = NativeLibrary(groupwise_quantization_cpp.SOURCE, "-ffp-contract=off", "-fno-trapping-math")
NUMBERS = (torch.float32, torch.bfloat16)
"""Dtypes that can be quantized. Masks may also be boolean."""
FEWEST = 2**19
"""Minimum number of elements per thread. Quantizing this number takes about 0.2 ms."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integer dtype of the same size as an element, by the element's number of bytes."""


def has_compiled_kernel(dtype: torch.dtype) -> bool:
    return (dtype in NUMBERS or dtype == torch.bool) and CODES.is_there()


def pack_lines(
    lines: Tensor, seed: Tensor, by_place: Tensor, first: int, bits: int, zeros: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each line of (n, w) as one group. Return bytes (n, w·bits/8), and minimums and steps (n, 1)."""
    count, width = lines.shape
    codes = lines.new_empty((count, width * bits // 8), dtype=torch.uint8)
    least, step = (lines.new_empty((count, 1), dtype=torch.bfloat16) for _ in range(2))
    _run("encode", lines, bits, zeros, lines, width, int(seed), by_place, first, codes, least, step)
    return codes, least, step


def extremes(lines: Tensor, zeros: bool) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each line of (n, w), as (n, 1) in float32."""
    low, high = (lines.new_empty((len(lines), 1), dtype=torch.float32) for _ in range(2))
    _run("extremes", lines, zeros, lines, lines.shape[1], low, high)
    return low, high


def quantize_lines(
    lines: Tensor, least: Tensor, step: Tensor, seed: Tensor, by_place: Tensor, first: int, bits: int, zeros: bool
) -> Tensor:
    """Quantize lines (n, w) to bytes (n, w·bits/8), with the minimum and step (n, 1) of each line."""
    codes = lines.new_empty((len(lines), lines.shape[1] * bits // 8), dtype=torch.uint8)
    ends = least.contiguous(), step.contiguous()
    _run("quantise", lines, bits, zeros, lines, lines.shape[1], int(seed), by_place, first, codes, *ends)
    return codes


def unpack_lines(
    packed: Tensor,
    least: Tensor,
    step: Tensor,
    seed: Tensor,
    by_place: Tensor,
    first: int,
    bits: int,
    zeros: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize bytes (n, w·bits/8) to lines (n, w)."""
    lines = packed.new_empty((len(packed), packed.shape[1] * 8 // bits), dtype=dtype)
    ends = least.float().contiguous(), step.float().contiguous()
    _run("decode", lines, bits, zeros, lines, lines.shape[1], int(seed), by_place, first, packed, *ends)
    return lines


def encode_mask_lines(lines: Tensor, high: Tensor) -> Tensor:
    """Pack lines (n, w) to bytes (n, w/8), one bit per element."""
    codes = lines.new_empty((len(lines), lines.shape[1] // 8), dtype=torch.uint8)
    _run("encode_mask", lines, lines, lines.shape[1], _bits_of(high), codes)
    return codes


def decode_mask_lines(packed: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Unpack bytes (n, w/8), one bit per element, to lines (n, w) of two values."""
    lines = packed.new_empty((len(packed), packed.shape[1] * 8), dtype=high.dtype)
    _run("decode_mask", lines, lines, lines.shape[1], _bits_of(low), _bits_of(high), packed)
    return lines


def _bits_of(value: Tensor) -> int:
    return int(value.view(_BITS[value.element_size()]))


def _run(name: str, lines: Tensor, *arguments: Tensor | int) -> None:
    """Run a C++ function on a range of lines. The function's first argument is the number of bytes per element."""
    CODES.run(name, (lines.element_size(), *arguments), len(lines), max(FEWEST // lines.shape[1], 1))
