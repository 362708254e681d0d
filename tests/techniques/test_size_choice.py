"""Selection among tried sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from thrifty.techniques.growth._size_choice import best_size, fitted_weight, sizes_up


@given(
    some.floats(0.01, 2),
    some.lists(some.floats(1, 1e12), min_size=2, max_size=6, unique_by=lambda t: round(math.log(t), 1)),
)
def test_the_weight_of_a_power_law_is_fitted_to_points(weight: float, times: list[float]) -> None:
    assert fitted_weight([3 * time**-weight for time in times], times) == pytest.approx(weight, rel=1e-6)


def test_the_weight_is_zero_if_time_does_not_help() -> None:
    assert fitted_weight([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert fitted_weight([1.0], [5.0]) == 0.0 and math.copysign(1, fitted_weight([1.0], [5.0])) == 1.0


def test_the_best_size_has_the_lowest_product() -> None:
    losses, times = [2.0, 1.5, 1.4], [1.0, 2.0, 4.0]
    for weight in (0.0, 0.2, 1.0):
        worth = [loss * time**weight for loss, time in zip(losses, times, strict=True)]
        assert best_size(losses, times, weight) == worth.index(min(worth))
    assert [best_size(losses, times, weight) for weight in (0.0, 0.2, 1.0)] == [2, 1, 0]


def test_a_point_below_the_fitted_law_is_chosen() -> None:
    times = [1.0, 2.0, 4.0]
    losses = [time**-0.5 * factor for time, factor in zip(times, (1.0, 0.9, 1.0), strict=True)]
    assert best_size(losses, times, fitted_weight(losses, times)) == 1


def test_sizes_rise_to_the_double_and_at_most_to_one() -> None:
    assert sizes_up(0.25, 3) == [0.5, 0.375, 0.25]
    assert sizes_up(0.75, 2) == [1.0, 0.75]
    assert sizes_up(0.5, 1) == [1.0]
    assert sizes_up(1.0, 3) == [1.0]
