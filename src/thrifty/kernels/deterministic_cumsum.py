"""Sums along a line that have the same bits each time, on a GPU too."""

from torch import Tensor

_PARTS = 2.0**36
"""Of one: as fine as float32 is near 2^-13, with room for sums up to 2^27."""


def running_sums(numbers: Tensor, dim: int) -> Tensor:
    """The cumsum along a dim of finite numbers (…) whose sums stay below 2^27, such as probabilities; no gradient goes
    through it. A GPU adds up floating-point numbers in no fixed order, and whole ones exactly: there these are rounded
    to multiples of 2^-36."""
    if not numbers.is_cuda:
        return numbers.cumsum(dim)
    return (numbers.double() * _PARTS).round_().long().cumsum(dim).double().div_(_PARTS).to(numbers.dtype)
