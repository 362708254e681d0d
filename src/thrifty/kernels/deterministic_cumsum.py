"""Cumulative sums with the same bits each time, also on a GPU."""

from torch import Tensor

_PARTS = 2.0**36
"""Fixed-point units per one: as fine as float32 near 2^-13, with room for sums up to 2^27."""


def running_sums(numbers: Tensor, dim: int) -> Tensor:
    """Return the cumsum along a dim of finite elements (…) with sums below 2^27, such as probabilities; no gradient.

    A GPU sums floats in no fixed order, but integers exactly: there, elements are rounded to multiples of 2^-36.
    """
    if not numbers.is_cuda:
        return numbers.cumsum(dim)
    return (numbers.double() * _PARTS).round_().long().cumsum(dim).double().div_(_PARTS).to(numbers.dtype)
