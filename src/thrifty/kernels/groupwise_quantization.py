"""Groupwise quantization to 2, 4 or 8 bits: one code per element, and a minimum and a step per group of a few hundred
elements.

The idea is from Chen et al. 2021, ActNN (arXiv 2104.14129). A code q represents least + q · step, where least is the
group's minimum. Rounding is stochastic, so the dequantized value is unbiased; its variance is at most step² / 4. The
published code of ActNN rounds a group's minimum and step *after* quantizing with them, which adds a bias. Here both are
first rounded outward to bfloat16, so that all elements of the group stay within the range.

Elements are arranged as lines (n, w), with w a multiple of 8. Byte j of a line contains elements j, j + w·bits/8 and so
on. Neighboring elements therefore go to neighboring bytes, and every operation processes whole vectors. Random bits are
a hash of the line, the position in the line and a seed. This module contains the functions as torch operations.
`quantized_tensors.py` runs these functions in pieces that fit the cache, or runs a faster equivalent:
`compiled_quantization.py` on a CPU, torch.compile on a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_ONE = 2**16
"""One step in fixed point. 16 random bits decide between two neighboring codes."""
_LEAST_STEP = 2.0**-111
"""Minimum step. Groups with a smaller step count as constant, because 2^16 / step would overflow."""
_FRACTION = {torch.bfloat16: 0xFFFF, torch.float16: 0x1FFF}
"""Float32 bits that conversion to these dtypes drops."""
_SPREAD = -1640531527
"""2^32 times the golden ratio, as int32."""


def mix_bits_torch(words: Tensor) -> Tensor:
    """Map int32 words (…) by a bijection in which every output bit depends on every input bit."""
    words = (words ^ (words >> 16 & 0xFFFF)) * 0x21F0AAAD
    words = (words ^ (words >> 15 & 0x1FFFF)) * 0x735A2D97
    return words ^ (words >> 15 & 0x1FFFF)


def seed_word(seed: int, device: torch.device) -> Tensor:
    """Return a 32-bit seed as an int32 scalar with mixed bits. The host mixes the bits, so no device synchronization is
    required.
    """
    word = seed % 2**32
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15) * 0x735A2D97 % 2**32
    word ^= word >> 15
    return torch.full((), (word + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=device)


def words_of_lines(first: int, count: int, seed: Tensor) -> Tensor:
    """Return a hash for each of `count` lines of a tensor, starting at line `first`, as (count, 1) in int32."""
    lines = torch.arange(first, first + count, dtype=torch.int32, device=seed.device)
    return mix_bits_torch(mix_bits_torch(lines * _SPREAD) + seed)[:, None]


def words_of_places(width: int, device: torch.device) -> Tensor:
    """Return a hash for each position in a line, (width,) in int32."""
    return mix_bits_torch(torch.arange(1, width + 1, dtype=torch.int32, device=device) * _SPREAD)


def extremes(lines: Tensor, zeros: bool) -> tuple[Tensor, Tensor]:
    """Return minimum and maximum of each line, (n, 1) in float32. With `zeros`, only nonzero elements count."""
    if not zeros:
        return _extreme(lines, torch.minimum, torch.amin), _extreme(lines, torch.maximum, torch.amax)
    is_zero = lines == 0
    low = _extreme(torch.where(is_zero, torch.inf, lines), torch.minimum, torch.amin)
    high = _extreme(torch.where(is_zero, -torch.inf, lines), torch.maximum, torch.amax)
    all_zero = low > high
    return torch.where(all_zero, 0.0, low), torch.where(all_zero, 0.0, high)


def _extreme(lines: Tensor, elementwise: Callable[..., Tensor], over_line: Callable[..., Tensor]) -> Tensor:
    """Return the extreme of each line, by reducing quarters of the line elementwise first.

    If a whole line were compiled as one reduction, each comparison would wait for the previous comparison and take
    nearly twice as long.
    """
    for _ in range(2):
        half = lines.shape[1] // 2
        lines = elementwise(lines[:, :half], lines[:, half:])
    return over_line(lines, 1, keepdim=True).float()


def round_outward(low: Tensor, high: Tensor, bits: int, zeros: bool) -> tuple[Tensor, Tensor]:
    """Return the minimum (n, 1) and the step (n, 1) of quantized values in the range from `low` to `high`, each (n, 1).
    Both are float32 and exact in bfloat16.
    """
    bits_of_low = low.view(torch.int32)
    # bfloat16 drops the lower half of a float32; truncation rounds toward zero
    least = (torch.where(low < 0, bits_of_low + 0xFFFF, bits_of_low) & ~0xFFFF).view(torch.float32)
    step = ((high - least) / (2**bits - 1 - int(zeros))).view(torch.int32)
    return least, (step + 0xFFFF & ~0xFFFF).view(torch.float32)


def quantize_lines(
    lines: Tensor, least: Tensor, step: Tensor, seed: Tensor, by_place: Tensor, first: int, bits: int, zeros: bool
) -> Tensor:
    """Return bytes (n, w·bits/8) for elements (n, w). Each line has its minimum and step (n, 1).

    Elements outside the range get the first or the last code. With `zeros`, code 0 represents only exact zeros. `first`
    is the index of the first line in its tensor.
    """
    by_line = words_of_lines(first, len(lines), seed)
    parts, top = 8 // bits, 2**bits - 1 - int(zeros)
    lanes = lines.shape[1] // parts
    scale = torch.where(step > _LEAST_STEP, _ONE / step, 0.0)
    word = packed = torch.zeros(())
    for part in range(parts):
        numbers = lines[:, part * lanes : (part + 1) * lanes].float()
        is_zero = numbers == 0
        if zeros:  # zeros far outside the range would overflow
            numbers = torch.where(is_zero, least, numbers)
        if part % 2 == 0:  # one 32-bit word provides the random bits of two elements
            word = mix_bits_torch(by_line ^ by_place[part // 2 * lanes : (part // 2 + 1) * lanes])
        chance = (word >> 16 if part % 2 else word) & 0xFFFF
        code = (((numbers - least) * scale).to(torch.int32) + chance >> 16).clamp(0, top)
        if zeros:
            code = torch.where(is_zero, 0, code + 1)
        packed = packed | code << bits * part if part else code
    return packed.to(torch.uint8)


def pack_lines(
    lines: Tensor, seed: Tensor, by_place: Tensor, first: int, bits: int, zeros: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bytes of lines, one group per line, and their minimums and steps (n, 1) in bfloat16."""
    least, step = round_outward(*extremes(lines, zeros), bits, zeros)
    packed = quantize_lines(lines, least, step, seed, by_place, first, bits, zeros)
    return packed, least.bfloat16(), step.bfloat16()


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
    """Return the values (n, w) of bytes. Each line has its minimum and step (n, 1). If `dtype` is narrower than
    float32, values are also rounded stochastically. With rounding to nearest bfloat16, 8-bit codes would be biased by
    1/20 of a step.
    """
    least, step, fraction = least.float(), step.float(), _FRACTION.get(dtype, 0)
    lanes, parts, word = packed.shape[1], [], torch.zeros(())
    by_line = words_of_lines(first, len(packed), seed + 1)  # independent of the random bits of quantization
    for part in range(8 // bits):
        code = packed >> bits * part & 2**bits - 1
        numbers = (code.float() - float(zeros)) * step + least
        if zeros:
            numbers = torch.where(code == 0, 0.0, numbers)
        if fraction:
            if part % 2 == 0:
                word = mix_bits_torch(by_line ^ by_place[part // 2 * lanes : (part // 2 + 1) * lanes])
            chance = (word >> 16 if part % 2 else word) & fraction
            numbers = (numbers.view(torch.int32) + chance & ~fraction).view(torch.float32)
        parts.append(numbers.to(dtype))
    return torch.cat(parts, 1)


def encode_mask_lines(lines: Tensor, high: Tensor) -> Tensor:
    """Return lines (n, w) as one bit per element, (n, w/8) bytes. A bit is set if the element equals `high` ()."""
    lanes = lines.shape[1] // 8
    packed = (lines[:, :lanes] == high).to(torch.uint8)
    for part in range(1, 8):
        packed = packed | (lines[:, part * lanes : (part + 1) * lanes] == high).to(torch.uint8) << part
    return packed


def decode_mask_lines(packed: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return elements (n, w): `high` for set bits and `low` for clear bits. Both are scalars ()."""
    return torch.cat([torch.where((packed >> part & 1).bool(), high, low) for part in range(8)], 1)
