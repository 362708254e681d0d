"""Stochastic rounding to bfloat16: up or down at random, so that the expectation is exact.

A moving average with decay 0.999 changes by a thousandth of itself in a step. That is less than half the distance
between two neighbors with 8 mantissa bits: rounded to the nearest, it would never move. Rounded stochastically, it
moves sometimes, and its expectation is exact (Gupta et al. 2015, arXiv 1502.02551).

The random bits are a hash of the value itself, its column and the step. They are the same on every rank, in every order
and for any division of the rows, and cost a few integer operations. The hash ignores the lowest bits, so that two
computations that agree to a few units in the last place round alike.
"""

import torch
from torch import Tensor

_SPREAD = -25033
"""40503 in 16 bits, the golden ratio times 2^16: multiplication by it is a permutation of all bit patterns."""
_APART = 25173
"""Factor of the column index in the hash."""


def chances(bits: Tensor, seed: int | Tensor) -> Tensor:
    """Return uniform int16 numbers from int16 `bits` (…, columns) and the step's seed in [-2^15, 2^15).

    Over all seeds, each bit pattern in each column gets every number exactly once.
    """
    # without the column, values that once became equal would stay equal under equal updates
    columns = torch.arange(bits.shape[-1], dtype=torch.int32, device=bits.device) * _APART
    return (bits ^ (columns.to(torch.int16) ^ seed)).mul_(_SPREAD)


def round_to_bfloat16(numbers: Tensor, seed: int | Tensor) -> Tensor:
    """Return float32 `numbers` (…) rounded to one of the two neighboring bfloat16 values, unbiased over all seeds.

    A value that bfloat16 can represent does not change.
    """
    upper = numbers.bfloat16().view(torch.int16)
    below = chances(upper, seed).view(torch.uint16).to(torch.int32)
    # bfloat16 drops the lower half of a float32; a random addend carries into the upper half in proportion
    return below.add_(numbers.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()
