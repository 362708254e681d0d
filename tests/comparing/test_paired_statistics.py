"""Intervals, tests and power, on pairs whose truth is known."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.comparing.paired_statistics import (
    ALPHA,
    MOST_PAIRS,
    interval,
    least_pairs,
    p_value,
    paired,
    pairs_for,
    power_of,
    smallest_effect,
)
from thrifty.core.errors import UsageError


def share_covering(pairs: int, trials: int) -> float:
    """How many intervals of pairs around 0 hold 0."""
    values = np.random.default_rng(pairs).normal(size=(trials, pairs))
    return float(np.mean([low <= 0 <= high for low, high in map(interval, values)]))


def test_intervals_cover_the_truth_in_93_to_97_percent() -> None:
    assert 0.93 <= share_covering(8, 600) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [7, 8, 12, 20])
def test_intervals_cover_the_truth_in_93_to_97_percent_of_many(pairs: int) -> None:
    assert 0.93 <= share_covering(pairs, 4000) <= 0.97


@given(st.lists(st.floats(0.01, 10), min_size=6, max_size=7), st.sampled_from([0.05, ALPHA]))
@settings(max_examples=4)
def test_whatever_the_differences_changes_of_their_sign_pass_no_oftener_than_alpha(
    sizes: list[float], alpha: float
) -> None:
    signs = itertools.product((1.0, -1.0), repeat=len(sizes))
    passed = [p_value(np.array(each) * sizes) <= alpha for each in signs]
    assert np.mean(passed) <= alpha


@given(st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=2, max_size=7))
@settings(max_examples=25)
def test_p_is_the_share_of_all_changes_of_sign_whose_mean_is_as_far_from_zero(values: list[float]) -> None:
    far = abs(np.mean(values)) - 1e-9
    means = [abs(np.mean(np.array(each) * values)) for each in itertools.product((1.0, -1.0), repeat=len(values))]
    assert p_value(values) == pytest.approx(float(np.mean([mean >= far for mean in means])))


def test_few_pairs_cannot_pass() -> None:
    assert p_value([1.0, 1.1, 0.9]) == 0.25
    assert p_value([1.0, 1.1, 0.9, 1.2, 0.8, 1.0]) > ALPHA
    assert p_value([1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.1]) < ALPHA
    assert least_pairs(0.05) == 6 and least_pairs(ALPHA) == 7 and least_pairs(ALPHA / 3) == 8
    assert smallest_effect(6) == math.inf


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pairs", [7, 9])
def test_an_effect_that_is_said_to_be_seen_is_found_in_as_many_cases_as_said(pairs: int) -> None:
    """By the test and the interval together, as a verdict asks for."""
    effect, found, trials = smallest_effect(pairs), 0, 250
    for values in np.random.default_rng(1).normal(effect, 1.0, (trials, pairs)):
        low, high = interval(values)
        found += p_value(values) <= ALPHA and (low > 0 or high < 0)
    assert 0.74 <= found / trials <= 0.86


def test_power_by_simulation_meets_that_of_students_t_where_it_is_taken_over() -> None:
    assert smallest_effect(10) == pytest.approx(smallest_effect(11), rel=0.12)
    assert power_of(0.0, 10) == pytest.approx(ALPHA, abs=0.01)
    effects = [smallest_effect(pairs) for pairs in range(7, 30)]
    assert effects == sorted(effects, reverse=True)


@pytest.mark.parametrize(("effect", "spread"), [(0.01, 0.005), (0.01, 0.01), (0.02, 0.1)])
def test_the_pairs_that_an_effect_needs_are_the_fewest_that_see_it(effect: float, spread: float) -> None:
    pairs = pairs_for(effect, spread)
    assert smallest_effect(pairs) * spread <= effect
    assert pairs == least_pairs() or smallest_effect(pairs - 1) * spread > effect


def test_what_no_number_of_pairs_could_see_is_said_to_need_the_most() -> None:
    assert pairs_for(1e-6, 1.0) == pairs_for(0.0, 1.0) == MOST_PAIRS


def test_equal_pairs_have_no_interval_but_a_point() -> None:
    found = paired([0.0] * 8)
    assert (found.mean, found.low, found.high, found.p, found.smallest_effect) == (0, 0, 0, 1, 0)
    assert paired([0.5] * 8).low == 0.5


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_no_differences_or_infinite_ones_are_refused(values: list[float]) -> None:
    with pytest.raises(UsageError):
        paired(values)
