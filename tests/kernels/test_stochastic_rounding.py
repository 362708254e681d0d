"""Stochastic rounding is unbiased, exact for representable values, and deterministic."""

import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from thrifty.kernels.stochastic_rounding import chances, round_to_bfloat16

SEEDS = torch.arange(-(2**15), 2**15).to(torch.int16)[:, None]
"""All seeds, one for each row."""
finite = some.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def rounded_with_every_seed(number: float) -> Tensor:
    return round_to_bfloat16(torch.full((2**16, 1), number), SEEDS).double()


@given(bits=some.integers(-(2**15), 2**15 - 1))
def test_each_bit_pattern_gets_every_number_once_over_seeds(bits: int) -> None:
    actual = chances(torch.full((2**16, 3), bits, dtype=torch.int16), SEEDS)
    assert torch.equal(actual.sort(0).values, SEEDS.expand(-1, 3))
    assert (actual[:, 0] != actual[:, 1]).all()


@given(number=finite.filter(lambda number: 1e-30 < abs(number) < 1e30))
def test_rounding_is_unbiased_between_two_neighbors(number: float) -> None:
    actual = rounded_with_every_seed(number)
    below, above = actual.min(), actual.max()
    assert below <= number <= above
    assert set(actual.unique().tolist()) == {float(below), float(above)}
    assert (above - below) / abs(number) < 2**-7
    assert abs(float(actual.mean()) - number) <= 2**-15 * float(above - below)


@given(number=finite)
def test_representable_values_do_not_change(number: float) -> None:
    representable = torch.tensor([number, 0.0, -0.0]).bfloat16()
    for seed in (-(2**15), -1, 0, 12345, 2**15 - 1):
        assert torch.equal(
            round_to_bfloat16(representable.float(), seed).view(torch.int16), representable.view(torch.int16)
        )


def test_nearly_equal_values_are_rounded_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(100_000, generator=generator)
    nearly = numbers * (1 + 2**-23)
    different = round_to_bfloat16(numbers, 77) != round_to_bfloat16(nearly, 77)
    assert (numbers != nearly).all() and different.float().mean() < 1e-4


def test_rounding_is_unbiased_over_values_at_one_step() -> None:
    numbers = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    error = (round_to_bfloat16(numbers, 5).float() - numbers) / (numbers.abs() * 2**-8)
    assert abs(float(error.mean())) < 5e-3


def test_slow_average_moves_only_with_stochastic_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.linspace(1, 2, 256).bfloat16().float()
    exact = nearest = stochastic = start
    for seed in torch.randint(-(2**15), 2**15, (2000,), generator=generator).tolist():
        exact = exact * 0.999
        nearest = (nearest * 0.999).bfloat16().float()
        stochastic = round_to_bfloat16(stochastic * 0.999, seed).float()
    assert torch.equal(nearest, start)
    assert exact.mean() < 0.14 * start.mean()
    assert abs(float((stochastic / exact).mean()) - 1) < 0.01
    assert len(stochastic.unique()) > 30
