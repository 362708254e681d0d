"""Cumulative sums that are bit-identical in every run, also on a GPU."""

from torch import Tensor

_PARTS = 2.0**36
"""Fixed-point units per 1.0. A unit is as fine as float32 near 2^-13, and int64 holds sums below 2^27."""


def running_sums(numbers: Tensor, dim: int) -> Tensor:
    """Return the cumulative sum of `numbers` along `dim`, in the same shape.

    Numbers must be finite, and sums must be below 2^27.

    A GPU sums floats in no fixed order, but sums integers exactly. On a GPU, elements are therefore rounded to
    multiples of 2^-36, and the result has no gradient.
    """
    if not numbers.is_cuda:
        return numbers.cumsum(dim)
    return (numbers.double() * _PARTS).round_().long().cumsum(dim).double().div_(_PARTS).to(numbers.dtype)
