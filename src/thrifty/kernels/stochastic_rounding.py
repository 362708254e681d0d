"""Stochastic rounding to bfloat16: up or down at random, so that the expected value is exact.

A moving average with decay 0.999 changes by 1/1000 of its value per step. With 8 mantissa bits, that is less than half
the distance between neighboring values, so rounding to nearest would never change it. With stochastic rounding it
changes in some steps, and its expected value is exact (Gupta et al. 2015, arXiv 1502.02551).

The random bits are a hash of the value, its column and the step. They depend neither on the rank nor on the order or
division of rows. A hash costs a few integer operations. The hash ignores the lowest bits, so that computations that
differ by a few units in the last place are rounded in the same direction.
"""

import torch
from torch import Tensor

_SPREAD = -25033
"""40503 as a signed 16-bit integer: 2^16 times the golden ratio. Multiplication by it permutes all bit patterns."""
_APART = 25173
"""Factor of the column index in the hash."""


def chances(bits: Tensor, seed: int | Tensor) -> Tensor:
    """Return uniform random int16 numbers from int16 `bits` (…, columns) and the step's seed in [-2^15, 2^15).

    Over all seeds, each bit pattern in each column gets every number exactly once.
    """
    # without the column, equal values with equal updates would stay equal forever
    columns = torch.arange(bits.shape[-1], dtype=torch.int32, device=bits.device) * _APART
    return (bits ^ (columns.to(torch.int16) ^ seed)).mul_(_SPREAD)


def round_to_bfloat16(numbers: Tensor, seed: int | Tensor) -> Tensor:
    """Return float32 `numbers` (…), rounded to one of the two neighboring bfloat16 values, unbiased over all seeds.

    A value that bfloat16 represents exactly is unchanged.
    """
    upper = numbers.bfloat16().view(torch.int16)
    below = chances(upper, seed).view(torch.uint16).to(torch.int32)
    # bfloat16 drops the lower half of a float32; random bits carry into the upper half with the right probability
    return below.add_(numbers.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()
