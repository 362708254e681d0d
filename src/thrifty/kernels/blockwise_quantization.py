"""Blockwise 8-bit quantization: one code per element, and one float32 scale per block of at most 256 elements.

Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861). A code represents a value in [-1,
1], or [0, 1] for non-negative elements, relative to the block's largest magnitude. Code values are dense near 1 and
reach down to 10^-7 in decades ("dynamic tree"), because gradient moments span many decades.

There are three differences from the paper. Code 0 represents zero, so multiplying codes by a mask masks the values.
Only an exact zero gets code 0, because updates divide by the root of the second moment, which must not become zero
before the first moment. The scale has the sign of the block's element of largest magnitude, so this element is always
represented by 1. The code book contains no -1; without the sign, a negative element of largest magnitude would shrink
at each quantization.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thrifty.kernels.stochastic_rounding import chances

BLOCK = 256
_TOP = 2.0**15
"""Magnitude to which a block's largest element is scaled before lookup by float16 bits.

Below this magnitude float16 covers 12 decades; it overflows only at twice this magnitude.
"""
_LEAST = 2.0**-110
"""Minimum scale, so that `_TOP / scale` is finite."""


@dataclass(frozen=True)
class CodeBook:
    """Lookup tables for quantization and dequantization."""

    signed: bool
    values: Tensor
    """Value of each code, (256,) in float32."""
    places: Tensor
    """Position of each float16 number between two codes, indexed by the bits of the number, (65536,) in int16. The unit
    is 1/256 of the distance between codes. Positions include an offset of half a code, and are modulo 2^16. The nearest
    code is `places >> 8`.
    """


def dynamic_values(signed: bool) -> Tensor:
    """Return the paper's 256 values in ascending order, in float64: 0, 1 and seven decades from 10^-7 to 1.

    Each decade has twice as many values as the previous one. The values are midpoints of equal parts of [0.1, 1], times
    the decade's upper end. With `signed`, each decade has half as many positive values, and their negatives.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        middles = [10.0 ** (decade - 6) * (0.1 + 0.9 * (part + 0.5) / count) for part in range(count)]
        values += middles + [-middle for middle in middles if signed]
    return torch.tensor(sorted(values), dtype=torch.float64)


def code_book(signed: bool, device: torch.device | str = "cpu") -> CodeBook:
    values = dynamic_values(signed).to(device)
    zero = 127 if signed else 0
    halves = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.uint16).view(torch.float16).double() / _TOP
    halves = halves.nan_to_num(0.0).clamp(values[0], values[-1])
    below = (torch.bucketize(halves, values, right=True) - 1).clamp(0, 254)
    share = (halves - values[below]) / (values[below + 1] - values[below])
    places = below + share - zero
    places = torch.where(halves > 0, places.clamp(min=1.0), torch.where(halves < 0, places.clamp(max=-1.0), 0.0))
    wrapped = (places * 256).round().to(torch.int32) + 128
    return CodeBook(signed, values.roll(-zero).float(), wrapped.to(torch.int16))


def block_count(columns: int) -> int:
    """Return the number of blocks in a row of `columns` elements.

    Blocks have equal sizes if equal sizes need at most twice the minimum number of blocks. Otherwise the last block is
    shorter.
    """
    least = max(-(-columns // BLOCK), 1)
    return next((count for count in range(least, 2 * least + 1) if columns % count == 0), least)


def quantize(
    numbers: Tensor, book: CodeBook, seed: int | Tensor | None = None, blocks: int = 0
) -> tuple[Tensor, Tensor]:
    """Return codes (r, …) in uint8 and scales (r, blocks) for float32 `numbers` (r, …).

    Each row has its own blocks, by default `block_count` blocks. Without a seed, an element gets the nearest code, up
    to float16 rounding and 1/512 of the distance between codes. With the step's seed, the element is rounded
    stochastically to one of the two neighboring codes, without bias.
    """
    rows = numbers.flatten(1)
    scales = _largest(rows, blocks or block_count(rows.shape[1]), book.signed)
    halves = _times(rows, _TOP / scales).half()
    places = book.places.index_select(0, halves.view(torch.uint16).flatten().to(torch.int32)).view(rows.shape)
    if seed is not None:
        places += chances(halves.view(torch.int16), seed) >> 8
    return (places >> 8).to(torch.uint8).view(numbers.shape), scales


def dequantize(codes: Tensor, scales: Tensor, book: CodeBook) -> Tensor:
    """Return the float32 values (r, …) of codes (r, …) with scales (r, blocks)."""
    rows = codes.flatten(1)
    values = book.values.index_select(0, rows.flatten().long())  # int32 indices are slower
    return _times(values.view(rows.shape), scales).view(codes.shape)


def _times(rows: Tensor, factors: Tensor) -> Tensor:
    """Return elements (r, c), each multiplied by the entry of factors (r, blocks) for its block."""
    count = factors.shape[1]
    size = -(-rows.shape[1] // count)
    if count * size == rows.shape[1]:
        return (rows.view(-1, count, size) * factors[..., None]).view(rows.shape)
    block = torch.arange(rows.shape[1], device=rows.device) // size
    return rows * factors.index_select(1, block)


def _largest(rows: Tensor, count: int, signed: bool) -> Tensor:
    """Return the element of largest magnitude, with its sign, of each block of rows (r, c)."""
    size = -(-rows.shape[1] // count)
    if count * size == rows.shape[1]:
        return _extreme(rows.view(-1, count, size), signed)
    full, rest = rows.split([(count - 1) * size, rows.shape[1] - (count - 1) * size], 1)
    return torch.cat([_extreme(full.unflatten(1, (-1, size)), signed), _extreme(rest[:, None], signed)], 1)


def _extreme(blocks: Tensor, signed: bool) -> Tensor:
    high = blocks.amax(-1)
    if not signed:
        return high.clamp_(min=_LEAST)
    low = blocks.amin(-1)
    return torch.where(high >= -low, high.clamp_(min=_LEAST), low.clamp(max=-_LEAST))
