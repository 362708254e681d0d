"""Groupwise quantization to 2, 4 or 8 bits: one code per element, a minimum and a step per group of a few hundred.

Idea: Chen et al. 2021, ActNN (arXiv 2104.14129). A code q represents least + q · step and is rounded stochastically, so
that the dequantized value is unbiased; the variance is at most step² / 4. Published code rounds a group's minimum and
step *after* quantizing with them, which adds a bias. Here both are first rounded outward to bfloat16, so that the group
still lies between its ends.

Elements come as lines (n, w), w a multiple of 8. Byte j of a line holds elements j, j + w·bits/8 and so on: neighbors
stay neighbors, and every operation works on whole vectors. The random bits are a hash of the line, the position in it
and a seed. These are the plain functions. `quantized_tensors.py` runs them in pieces that fit the cache, or a faster
equivalent: `compiled_quantization.py` on a CPU, torch.compile on a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_ONE = 2**16
"""A step in fixed point: 16 random bits decide between two codes."""
_LEAST_STEP = 2.0**-111
"""Smallest step. Narrower groups count as constant, because 2^16 times the inverse step would overflow."""
_FRACTION = {torch.bfloat16: 0xFFFF, torch.float16: 0x1FFF}
"""Bits of a float32 that these formats drop."""
_SPREAD = -1640531527
"""The golden ratio times 2^32, in 32 bits."""


def mix_bits_torch(words: Tensor) -> Tensor:
    """Return a permutation of int32 words (…) in which every bit of the result depends on every bit of the word."""
    words = (words ^ (words >> 16 & 0xFFFF)) * 0x21F0AAAD
    words = (words ^ (words >> 15 & 0x1FFFF)) * 0x735A2D97
    return words ^ (words >> 15 & 0x1FFFF)


def seed_word(seed: int, device: torch.device) -> Tensor:
    """Return a seed of 32 bits as int32 (), mixed on the host, so that no device synchronization is required."""
    word = seed % 2**32
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15) * 0x735A2D97 % 2**32
    word ^= word >> 15
    return torch.full((), (word + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=device)


def words_of_lines(first: int, count: int, seed: Tensor) -> Tensor:
    """Return a hash for each of `count` lines of a tensor, from line `first` on, int32 (count, 1)."""
    lines = torch.arange(first, first + count, dtype=torch.int32, device=seed.device)
    return mix_bits_torch(mix_bits_torch(lines * _SPREAD) + seed)[:, None]


def words_of_places(width: int, device: torch.device) -> Tensor:
    """Return a hash for each position of a line, int32 (width,)."""
    return mix_bits_torch(torch.arange(1, width + 1, dtype=torch.int32, device=device) * _SPREAD)


def extremes(lines: Tensor, zeros: bool) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each line, (n, 1) in float32; with `zeros`, over nonzero elements only."""
    if not zeros:
        return _extreme(lines, torch.minimum, torch.amin), _extreme(lines, torch.maximum, torch.amax)
    is_zero = lines == 0
    low = _extreme(torch.where(is_zero, torch.inf, lines), torch.minimum, torch.amin)
    high = _extreme(torch.where(is_zero, -torch.inf, lines), torch.maximum, torch.amax)
    all_zero = low > high
    return torch.where(all_zero, 0.0, low), torch.where(all_zero, 0.0, high)


def _extreme(lines: Tensor, elementwise: Callable[..., Tensor], over_line: Callable[..., Tensor]) -> Tensor:
    """Reduce quarters of a line elementwise first.

    Compiled for a whole line, each comparison would wait for the previous one, which took nearly twice as long.
    """
    for _ in range(2):
        half = lines.shape[1] // 2
        lines = elementwise(lines[:, :half], lines[:, half:])
    return over_line(lines, 1, keepdim=True).float()


def round_outward(low: Tensor, high: Tensor, bits: int, zeros: bool) -> tuple[Tensor, Tensor]:
    """Return minimum and step (n, 1), as float32 that bfloat16 can hold, of codes that cover `low` to `high` (n, 1)."""
    bits_of_low = low.view(torch.int32)
    # bfloat16 drops the lower half of a float32; cutting it off rounds toward zero
    least = (torch.where(low < 0, bits_of_low + 0xFFFF, bits_of_low) & ~0xFFFF).view(torch.float32)
    step = ((high - least) / (2**bits - 1 - int(zeros))).view(torch.int32)
    return least, (step + 0xFFFF & ~0xFFFF).view(torch.float32)


def quantize_lines(
    lines: Tensor, least: Tensor, step: Tensor, seed: Tensor, by_place: Tensor, first: int, bits: int, zeros: bool
) -> Tensor:
    """Return bytes (n, w·bits/8) for elements (n, w) in groups with this minimum and step (n, 1).

    Elements outside the range get the first or the last code. With `zeros`, code 0 represents exact zeros and nothing
    else. `first` is the index of the first line in its tensor.
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
        if part % 2 == 0:  # a word of 32 bits serves two elements
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
    """Return bytes of lines that each are a group, and their minimums and steps (n, 1) in bfloat16."""
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
    """Return the values (n, w) of the bytes of groups (n, 1). If `dtype` is narrower than float32, values are rounded
    stochastically too. Rounded to the nearest bfloat16, 8-bit codes would be biased by a twentieth of a step."""
    least, step, fraction = least.float(), step.float(), _FRACTION.get(dtype, 0)
    lanes, parts, word = packed.shape[1], [], torch.zeros(())
    by_line = words_of_lines(first, len(packed), seed + 1)  # independent of the words that chose the code
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
    """Return one bit per element of lines (n, w), set if it is `high` (), eight per byte, (n, w/8)."""
    lanes = lines.shape[1] // 8
    packed = (lines[:, :lanes] == high).to(torch.uint8)
    for part in range(1, 8):
        packed = packed | (lines[:, part * lanes : (part + 1) * lanes] == high).to(torch.uint8) << part
    return packed


def decode_mask_lines(packed: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return `high` for set and `low` for clear bits (both ()), (n, w)."""
    return torch.cat([torch.where((packed >> part & 1).bool(), high, low) for part in range(8)], 1)
