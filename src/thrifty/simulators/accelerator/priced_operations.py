"""Operations with an energy in the energy tables, and counts of operations."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key")


class PricedOperation(NamedTuple):
    """A kind of operation that energy tables list, with its size in bits."""

    kind: str
    """ "int_add", "int_multiply", "float_add", "float_multiply", "register", "sram" or "dram"."""
    bits: int
    capacity: int = 0
    """Bytes of the accessed memory, for "sram"."""


Operations = Mapping[PricedOperation, float]
"""Number of executions of each operation."""


def add_up(*counted: Mapping[Key, float]) -> dict[Key, float]:
    """Sum counts by key. Zero counts are omitted."""
    total: dict[Key, float] = {}
    for counts in counted:
        for key, count in counts.items():
            total[key] = total.get(key, 0.0) + float(count)
    return {key: count for key, count in total.items() if count}


def multiply_accumulate(count: float, bits: int, accumulator: int | None = None) -> Operations:
    """Return `count` integer products of `bits` bits and as many additions. The default accumulator has 2 · `bits`
    bits.
    """
    return {PricedOperation("int_multiply", bits): count, PricedOperation("int_add", accumulator or 2 * bits): count}
