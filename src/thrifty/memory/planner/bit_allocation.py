"""How many bits each of several tensors gets, so that together they disturb a result least within a total of bits."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from thrifty.core.errors import UsageError

RESOLUTION = 4096
"""Parts that the total is divided into where sizes have no large common divisor."""


def disturbance(sensitivity: float, bits: int) -> float:
    """The variance that a tensor's codes leave in a result: `sensitivity` is what it would be with a single step."""
    return sensitivity / (2**bits - 1) ** 2


def allocate_bits(
    sensitivities: Sequence[float], numbers: Sequence[int], mean_bits: float, choices: Sequence[int] = (2, 4, 8)
) -> list[int]:
    """Bits for each tensor of so many numbers, at most `mean_bits` for a number on average.

    The problem of ActNN (Chen et al. 2021, arXiv 2104.14129), who give one bit more to where it helps most, one after
    the other. That is best where all tensors are alike and any number of bits can be had. Here neither holds, and it is
    solved as a knapsack by dynamic programming: exactly, up to sizes rounded to a 4096th of the total.
    """
    least = min(choices)
    if mean_bits < least:
        raise UsageError(f"{mean_bits} bits for each number are fewer than {least}, the least", fix=f"at least {least}")
    if not numbers:
        return []
    unit = _unit(numbers, mean_bits)
    prices = [{bits: -(-(bits - least) * count // unit) for bits in choices} for count in numbers]
    room = int((mean_bits - least) * sum(numbers) // unit)
    best = torch.zeros(room + 1, dtype=torch.float64)  # by what may be spent on the tensors so far
    chosen: list[Tensor] = []
    for sensitivity, price in zip(sensitivities, prices, strict=True):
        ways = torch.full((len(choices), room + 1), torch.inf, dtype=torch.float64)
        for way, bits in enumerate(choices):
            if price[bits] <= room:
                ways[way, price[bits] :] = best[: room + 1 - price[bits]] + disturbance(sensitivity, bits)
        best, way = ways.min(0)
        chosen.append(way)
    allocated: list[int] = []
    for way, price in zip(reversed(chosen), reversed(prices), strict=True):
        allocated.append(choices[int(way[room])])
        room -= price[allocated[-1]]
    return allocated[::-1]


def _unit(numbers: Sequence[int], mean_bits: float) -> int:
    """What sizes are counted in: their greatest common divisor, or a small part of the total."""
    total = int(mean_bits * sum(numbers))
    return max(math.gcd(*numbers), -(-total // RESOLUTION))
