"""Rounding up or down by chance, in proportion to the distance, so that small changes are kept on average.

A moving average with decay 0.999 changes by a thousandth of itself in a step, less than half the distance between two
neighbours in 8 bits of mantissa: rounded to the nearest it would never move. Rounded by chance it moves now and then,
and its expectation is exact (Gupta et al. 2015, arXiv 1502.02551).

Chance is a hash of the number itself, its column and the step, so that it is the same on every rank, in every order
and however the rows are divided up, and takes a few integer operations. Only bits that small differences leave alone go
into it: two computations that agree to a few units in the last place round alike.
"""

import torch
from torch import Tensor

_SPREAD = -25033
"""40503 in 16 bits, the golden ratio times 2^16: multiplied by it, each pattern of bits goes to a place of its own."""
_APART = 25173
"""What neighbouring columns differ by."""


def chances(bits: Tensor, seed: int | Tensor) -> Tensor:
    """Evenly distributed int16 numbers from int16 `bits` (…, columns) and the step's seed in [-2^15, 2^15): over all
    seeds, each pattern of bits in each column gets every number exactly once."""
    # without the column, numbers that once became equal would stay so for as long as they are treated alike
    columns = torch.arange(bits.shape[-1], dtype=torch.int32, device=bits.device) * _APART
    return (bits ^ (columns.to(torch.int16) ^ seed)).mul_(_SPREAD)


def round_to_bfloat16(numbers: Tensor, seed: int | Tensor) -> Tensor:
    """float32 `numbers` in bfloat16, rounded to one of the two neighbours with the number itself as expectation over
    all seeds. What bfloat16 can hold stays as it is."""
    upper = numbers.bfloat16().view(torch.int16)
    below = chances(upper, seed).view(torch.uint16).to(torch.int32)
    # the lower half of a float32 is what bfloat16 drops; adding to it carries into the upper half in proportion
    return below.add_(numbers.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()
