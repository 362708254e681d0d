"""Groups of elements that share a quantization range in `groupwise_quantization.py`: neighbors, heads or channels.

A range per head is from Pan et al. 2021, Mesa (arXiv 2111.11124).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

GROUP = 256


@dataclass(frozen=True)
class QuantizationRanges:
    """Groups of elements that share a minimum and a step. A tensor in memory order is viewed as (outer, count, inner).
    Elements with the same index in the middle dim share a range. Each line of `width` elements lies in one range.
    """

    outer: int
    count: int
    inner: int
    width: int


def by_group(elements: int, group: int = GROUP) -> QuantizationRanges:
    """Return ranges of `group` neighboring elements in memory. The last range may have fewer elements."""
    return QuantizationRanges(1, -(-elements // group), group, group)


def by_head(size: Sequence[int], stride: Sequence[int], group: int) -> QuantizationRanges | None:
    """Return one range per head of a tensor (b, h, t, k), in any memory order. Return None if lines would have fewer
    than 8 elements.

    In tensors with fewer or more axes, at most `group` neighboring channels (last axis) share a range over all tokens.
    """
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
