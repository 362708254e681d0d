"""Allocation of bits to several tensors, so that their quantization changes a result least within a total of bits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thrifty.core.errors import UsageError

RESOLUTION = 4096
"""Number of parts of the total, if sizes have no large common divisor."""


def disturbance(sensitivity: float, bits: int) -> float:
    """Return the variance that quantization to `bits` causes; `sensitivity` is the variance with a single step."""
    return sensitivity / (2**bits - 1) ** 2


def allocate_bits(
    sensitivities: Sequence[float], sizes: Sequence[int], mean_bits: float, choices: Sequence[int] = (2, 4, 8)
) -> list[int]:
    """Return the bits per element of tensors with these `sizes` in elements, on average at most `mean_bits`.

    The problem is from ActNN (Chen et al. 2021, arXiv 2104.14129), which greedily adds one bit where it helps most.
    That is optimal if all tensors are alike and any number of bits is possible. Here neither holds, so the problem is
    solved as a knapsack by dynamic programming. The solution is exact, up to sizes rounded to a 4096th of the total.
    """
    least = min(choices)
    if mean_bits < least:
        raise UsageError(
            f"mean_bits={mean_bits} bits per element are fewer than {least}, the smallest choice",
            fix=f"set mean_bits to at least {least}",
        )
    if not sizes:
        return []
    unit = _unit(sizes, mean_bits)
    prices = [{bits: -(-(bits - least) * count // unit) for bits in choices} for count in sizes]
    room = int((mean_bits - least) * sum(sizes) // unit)
    best = torch.zeros(room + 1, dtype=torch.float64)  # indexed by the units spent on the tensors so far
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
    """Return the unit of sizes: their greatest common divisor, or a small part of the total."""
    total = int(mean_bits * sum(sizes))
    return max(math.gcd(*sizes), -(-total // RESOLUTION))
