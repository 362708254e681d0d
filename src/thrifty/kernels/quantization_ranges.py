"""Ranges shared by the numbers of a tensor in the codes of `groupwise_quantization.py`: neighbours, heads or channels.

A range for each head after Pan et al. 2021, Mesa (arXiv 2111.11124).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

GROUP = 256


@dataclass(frozen=True)
class QuantizationRanges:
    """Which numbers share a least number and a step: of a tensor in the order of its memory, seen as (outer, count,
    inner), those with the same entry of the middle. Each line of `width` numbers lies in one range."""

    outer: int
    count: int
    inner: int
    width: int


def by_group(numbers: int, group: int = GROUP) -> QuantizationRanges:
    """A range for each `group` neighbours in memory, the last of them perhaps fewer."""
    return QuantizationRanges(1, -(-numbers // group), group, group)


def by_head(size: Sequence[int], stride: Sequence[int], group: int) -> QuantizationRanges | None:
    """A range for each head of (b, h, t, k), in whatever order they are in memory; in tensors of other shapes for each
    `group` neighbours on the last axis, over all tokens. None where lines in one range would be shorter than 8."""
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], dim))
    sizes = [size[dim] for dim in order]
    if len(size) == 4:
        place = order.index(1)
        outer, count, inner = math.prod(sizes[:place]), sizes[place], math.prod(sizes[place + 1 :])
    else:
        inner = math.gcd(sizes[-1], group)
        outer, count = math.prod(sizes[:-1]), sizes[-1] // inner
    width = math.gcd(inner, GROUP)
    return QuantizationRanges(outer, count, inner, width) if width % 8 == 0 else None
