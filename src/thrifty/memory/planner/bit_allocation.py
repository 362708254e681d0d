"""Allocation of bits to tensors, so that quantization error is minimal for a total number of bits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thrifty.core.errors import UsageError

RESOLUTION = 4096
"""Number of units that divide the total size, if the sizes have no large common divisor."""


def disturbance(sensitivity: float, bits: int) -> float:
    """Return the error variance of quantization to `bits`. `sensitivity` is this variance at 1 bit."""
    return sensitivity / (2**bits - 1) ** 2


def allocate_bits(
    sensitivities: Sequence[float], sizes: Sequence[int], mean_bits: float, choices: Sequence[int] = (2, 4, 8)
) -> list[int]:
    """Return the bits per element of each tensor, on average at most `mean_bits`. `sizes` are numbers of elements.

    The problem is from ActNN (Chen et al. 2021, arXiv 2104.14129). ActNN is greedy: it adds one bit where the gain is
    largest. The greedy method is optimal only if tensors are equal and any number of bits is allowed. Here the problem
    is solved as a knapsack by dynamic programming. The solution is exact, except that sizes are rounded to 1/4096 of
    the total.
    """
    least = min(choices)
    if mean_bits < least:
        raise UsageError(
            f"mean_bits={mean_bits} is less than the smallest allowed number of bits, {least}",
            fix=f"mean_bits={least}",
        )
    if not sizes:
        return []
    unit = _unit(sizes, mean_bits)
    prices = [{bits: -(-(bits - least) * count // unit) for bits in choices} for count in sizes]
    room = int((mean_bits - least) * sum(sizes) // unit)
    best = torch.zeros(room + 1, dtype=torch.float64)  # index: units spent on the tensors so far
    chosen: list[Tensor] = []
    for sensitivity, price in zip(sensitivities, prices, strict=True):
        totals = torch.full((len(choices), room + 1), torch.inf, dtype=torch.float64)
        for index, bits in enumerate(choices):
            if price[bits] <= room:
                totals[index, price[bits] :] = best[: room + 1 - price[bits]] + disturbance(sensitivity, bits)
        best, argmin = totals.min(0)
        chosen.append(argmin)
    allocated: list[int] = []
    for argmin, price in zip(reversed(chosen), reversed(prices), strict=True):
        allocated.append(choices[int(argmin[room])])
        room -= price[allocated[-1]]
    return allocated[::-1]


def _unit(sizes: Sequence[int], mean_bits: float) -> int:
    """Return the unit of sizes: their greatest common divisor, but at least 1/4096 of the total."""
    total = int(mean_bits * sum(sizes))
    return max(math.gcd(*sizes), -(-total // RESOLUTION))
