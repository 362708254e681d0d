"""Allocated bits compared with all possible allocations."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from thrifty.core.errors import UsageError
from thrifty.memory.planner.bit_allocation import allocate_bits, disturbance

CHOICES = (2, 4, 8)


def total(sensitivities: list[float], bits: tuple[int, ...] | list[int]) -> float:
    return sum(map(disturbance, sensitivities, bits))


@settings(max_examples=100)
@given(
    tensors=some.lists(
        some.tuples(some.floats(1e-6, 1e6), some.integers(1, 12).map(lambda parts: 128 * parts)),
        min_size=1, max_size=6,
    ),
    mean_bits=some.floats(2, 8),
)  # fmt: skip
def test_allocation_is_optimal(tensors: list[tuple[float, int]], mean_bits: float) -> None:
    sensitivities, sizes = [each[0] for each in tensors], [each[1] for each in tensors]
    bits = allocate_bits(sensitivities, sizes, mean_bits, CHOICES)

    def spent(bits: tuple[int, ...] | list[int]) -> int:
        return sum(b * n for b, n in zip(bits, sizes, strict=True))

    allowed = mean_bits * sum(sizes)
    assert spent(bits) <= allowed
    fitting = (bits for bits in itertools.product(CHOICES, repeat=len(sizes)) if spent(bits) <= allowed)
    assert total(sensitivities, bits) <= min(total(sensitivities, bits) for bits in fitting) * (1 + 1e-9)


def test_sizes_without_common_divisor_are_near_the_optimum() -> None:
    draw = random.Random(0)
    for _ in range(20):
        sizes = [draw.randrange(10_000, 2_000_000) for _ in range(6)]
        sensitivities = [draw.lognormvariate(0, 3) for _ in sizes]
        bits = allocate_bits(sensitivities, sizes, 4, CHOICES)
        assert sum(b * n for b, n in zip(bits, sizes, strict=True)) <= 4 * sum(sizes)
        # possible loss by rounding up: the optimum for a total that is smaller by a 4096th for each tensor
        room = 4 * sum(sizes) * (1 - 2 * len(sizes) / 4096)
        tight = (
            bits for bits in itertools.product(CHOICES, repeat=6)
            if sum(b * n for b, n in zip(bits, sizes, strict=True)) <= room
        )  # fmt: skip
        assert total(sensitivities, bits) <= min(total(sensitivities, bits) for bits in tight) * (1 + 1e-9)


def test_sensitive_tensors_have_more_bits() -> None:
    assert allocate_bits([1.0, 1000.0, 1.0], [1, 1, 1], 4, CHOICES) == [2, 8, 2]
    assert allocate_bits([1.0] * 3, [1, 1, 1], 4, CHOICES) == [4, 4, 4]
    assert allocate_bits([], [], 4, CHOICES) == []


def test_too_few_bits_are_refused() -> None:
    with pytest.raises(UsageError, match="less than the smallest"):
        allocate_bits([1.0], [8], 1.5, CHOICES)
