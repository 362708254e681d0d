"""Actions that energy tables price, and how often they occur."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")


class PricedOperation(NamedTuple):
    """An action that an energy table prices."""

    kind: str
    """ "int_add", "int_multiply", "float_add", "float_multiply", "register", "sram" or "dram"."""
    bits: int
    capacity: int = 0
    """Bytes of the memory that is read or written, for "sram"."""


Operations = Mapping[PricedOperation, float]
"""Operations with their counts."""


def add_up(*counted: Mapping[Key, float]) -> dict[Key, float]:
    """Add counts by key, leaving out those that are zero."""
    total: dict[Key, float] = {}
    for part in counted:
        for what, count in part.items():
            total[what] = total.get(what, 0.0) + float(count)
    return {what: count for what, count in total.items() if count}


def multiply_accumulate(count: float, bits: int, accumulator: int | None = None) -> Operations:
    """`count` products of whole numbers of so many bits, each added up in twice the bits unless said otherwise."""
    return {PricedOperation("int_multiply", bits): count, PricedOperation("int_add", accumulator or 2 * bits): count}
