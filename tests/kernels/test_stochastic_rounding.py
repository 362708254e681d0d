"""Rounding by chance is right on average, exact where it can be, and the same wherever it is done."""

import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from thrifty.kernels.stochastic_rounding import chances, round_to_bfloat16

SEEDS = torch.arange(-(2**15), 2**15).to(torch.int16)[:, None]
"""All there are, one for each row."""
finite = some.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def rounded_with_every_seed(number: float) -> Tensor:
    return round_to_bfloat16(torch.full((2**16, 1), number), SEEDS).double()


@given(bits=some.integers(-(2**15), 2**15 - 1))
def test_over_all_seeds_each_pattern_of_bits_gets_every_number_once_in_each_column(bits: int) -> None:
    found = chances(torch.full((2**16, 3), bits, dtype=torch.int16), SEEDS)
    assert torch.equal(found.sort(0).values, SEEDS.expand(-1, 3))
    assert (found[:, 0] != found[:, 1]).all()


@given(number=finite.filter(lambda number: 1e-30 < abs(number) < 1e30))
def test_a_number_goes_to_a_neighbour_and_is_itself_on_average(number: float) -> None:
    found = rounded_with_every_seed(number)
    below, above = found.min(), found.max()
    assert below <= number <= above
    assert set(found.unique().tolist()) == {float(below), float(above)}
    assert (above - below) / abs(number) < 2**-7
    assert abs(float(found.mean()) - number) <= 2**-15 * float(above - below)


@given(number=finite)
def test_what_bfloat16_can_hold_stays_as_it_is(number: float) -> None:
    held = torch.tensor([number, 0.0, -0.0]).bfloat16()
    for seed in (-(2**15), -1, 0, 12345, 2**15 - 1):
        assert torch.equal(round_to_bfloat16(held.float(), seed).view(torch.int16), held.view(torch.int16))


def test_numbers_that_agree_but_for_their_last_bits_are_rounded_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(100_000, generator=generator)
    nearly = numbers * (1 + 2**-23)
    different = round_to_bfloat16(numbers, 77) != round_to_bfloat16(nearly, 77)
    assert (numbers != nearly).all() and different.float().mean() < 1e-4


def test_at_one_step_as_many_numbers_go_up_as_should() -> None:
    numbers = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    error = (round_to_bfloat16(numbers, 5).float() - numbers) / (numbers.abs() * 2**-8)
    assert abs(float(error.mean())) < 5e-3


def test_a_slow_average_stalls_when_rounded_to_the_nearest_and_moves_when_rounded_by_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.linspace(1, 2, 256).bfloat16().float()
    exact = nearest = chance = start
    for seed in torch.randint(-(2**15), 2**15, (2000,), generator=generator).tolist():
        exact = exact * 0.999
        nearest = (nearest * 0.999).bfloat16().float()
        chance = round_to_bfloat16(chance * 0.999, seed).float()
    assert torch.equal(nearest, start)
    assert exact.mean() < 0.14 * start.mean()
    assert abs(float((chance / exact).mean()) - 1) < 0.01
    assert len(chance.unique()) > 30
