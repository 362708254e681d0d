"""Numbers in 2, 4 or 8 bits: a code for each, and a least number and a step for each group of some hundred.

Idea: Chen et al. 2021, ActNN (arXiv 2104.14129). A code q stands for least + q · step and is rounded by chance, so that
the number is the expectation of what comes back; the variance is at most step² / 4. Published code rounds the two
numbers of a group *after* it has quantised with them, and loses that. Here they are rounded first, to bfloat16 and
outwards, so that the group still lies between its ends.

Numbers come as lines (n, w), w a multiple of 8. Byte j of a line holds numbers j, j + w·bits/8 and so on: neighbours
stay neighbours, and every operation is one on whole vectors. Chance is a hash of the line, the place in it and a seed.
These are the plain functions; `quantized_tensors.py` runs them in pieces that fit the cache, or what does the same
faster: `compiled_quantization.py` on a processor, themselves compiled on a GPU.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_ONE = 2**16
"""A step in fixed point: what decides between two codes are 16 bits."""
_LEAST_STEP = 2.0**-111
"""Groups less wide than this are as good as constant; the inverse of a smaller step, times 2^16, would overflow."""
_FRACTION = {torch.bfloat16: 0xFFFF, torch.float16: 0x1FFF}
"""The bits of a float32 that these formats do not have."""
_SPREAD = -1640531527
"""The golden ratio times 2^32, in 32 bits."""


def mix_bits_torch(words: Tensor) -> Tensor:
    """A permutation of the int32 numbers in which every bit of the result hangs on every bit of the word."""
    words = (words ^ (words >> 16 & 0xFFFF)) * 0x21F0AAAD
    words = (words ^ (words >> 15 & 0x1FFFF)) * 0x735A2D97
    return words ^ (words >> 15 & 0x1FFFF)


def seed_word(seed: int, device: torch.device) -> Tensor:
    """A seed of 32 bits as int32 (), `mixed` without the device, which need not be waited for."""
    word = seed % 2**32
    word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
    word = (word ^ word >> 15) * 0x735A2D97 % 2**32
    word ^= word >> 15
    return torch.full((), (word + 2**31) % 2**32 - 2**31, dtype=torch.int32, device=device)


def words_of_lines(first: int, count: int, seed: Tensor) -> Tensor:
    """What chance is to `count` lines of a tensor from the first on, int32 (count, 1)."""
    lines = torch.arange(first, first + count, dtype=torch.int32, device=seed.device)
    return mix_bits_torch(mix_bits_torch(lines * _SPREAD) + seed)[:, None]


def words_of_places(width: int, device: torch.device) -> Tensor:
    """What chance is to the places of a line, int32 (width,)."""
    return mix_bits_torch(torch.arange(1, width + 1, dtype=torch.int32, device=device) * _SPREAD)


def extremes(lines: Tensor, zeros: bool) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of each line, (n, 1) in float32; with `zeros` of those that are not zero."""
    if not zeros:
        return _extreme(lines, torch.minimum, torch.amin), _extreme(lines, torch.maximum, torch.amax)
    is_zero = lines == 0
    low = _extreme(torch.where(is_zero, torch.inf, lines), torch.minimum, torch.amin)
    high = _extreme(torch.where(is_zero, -torch.inf, lines), torch.maximum, torch.amax)
    all_zero = low > high
    return torch.where(all_zero, 0.0, low), torch.where(all_zero, 0.0, high)


def _extreme(lines: Tensor, of_two: Callable[..., Tensor], of_line: Callable[..., Tensor]) -> Tensor:
    """The quarters of a line first, each number for itself: compiled for a whole line, each comparison would wait for
    the one before, which took nearly twice as long."""
    for _ in range(2):
        half = lines.shape[1] // 2
        lines = of_two(lines[:, :half], lines[:, half:])
    return of_line(lines, 1, keepdim=True).float()


def round_outward(low: Tensor, high: Tensor, bits: int, zeros: bool) -> tuple[Tensor, Tensor]:
    """Least number and step, float32 that bfloat16 can hold, of codes that reach from `low` or below to `high` or
    above."""
    bits_of_low = low.view(torch.int32)
    # the lower half of a float32 is what bfloat16 drops: cut off it brings nearer to zero
    least = (torch.where(low < 0, bits_of_low + 0xFFFF, bits_of_low) & ~0xFFFF).view(torch.float32)
    step = ((high - least) / (2**bits - 1 - int(zeros))).view(torch.int32)
    return least, (step + 0xFFFF & ~0xFFFF).view(torch.float32)


def quantize_lines(
    lines: Tensor, least: Tensor, step: Tensor, seed: Tensor, by_place: Tensor, first: int, bits: int, zeros: bool
) -> Tensor:
    """Bytes (n, w·bits/8) for numbers (n, w) in groups of given least number and step (n, 1); what lies outside of
    them gets the first or the last code. With `zeros` code 0 is that of exact zeros and of nothing else. `first` is
    which line of its tensor the first one is."""
    by_line = words_of_lines(first, len(lines), seed)
    parts, top = 8 // bits, 2**bits - 1 - int(zeros)
    lanes = lines.shape[1] // parts
    scale = torch.where(step > _LEAST_STEP, _ONE / step, 0.0)
    word = packed = torch.zeros(())
    for part in range(parts):
        numbers = lines[:, part * lanes : (part + 1) * lanes].float()
        is_zero = numbers == 0
        if zeros:  # what is far outside would overflow
            numbers = torch.where(is_zero, least, numbers)
        if part % 2 == 0:  # a word of 32 bits serves two numbers
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
    """Bytes of lines that are each a group of its own, and their least numbers and steps (n, 1) in bfloat16."""
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
    """What the bytes of groups (n, 1) stand for, (n, w). Where `dtype` cannot hold that it is rounded by chance, too:
    rounded to the nearest, codes of 8 bits would be biased by a twentieth of a step in bfloat16."""
    least, step, fraction = least.float(), step.float(), _FRACTION.get(dtype, 0)
    lanes, parts, word = packed.shape[1], [], torch.zeros(())
    by_line = words_of_lines(first, len(packed), seed + 1)  # other words than those that chose the code
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
    """Which numbers of lines (n, w) are `high` (), eight in a byte, (n, w/8)."""
    lanes = lines.shape[1] // 8
    packed = (lines[:, :lanes] == high).to(torch.uint8)
    for part in range(1, 8):
        packed = packed | (lines[:, part * lanes : (part + 1) * lanes] == high).to(torch.uint8) << part
    return packed


def decode_mask_lines(packed: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The values `high` and `low` (), for set and clear bits, (n, w)."""
    return torch.cat([torch.where((packed >> part & 1).bool(), high, low) for part in range(8)], 1)
