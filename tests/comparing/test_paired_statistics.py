"""Intervals, tests and power, for pairs with a known true mean."""

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


def coverage(pairs: int, trials: int) -> float:
    """Return the fraction of intervals that contain 0, for pairs with a true mean of 0."""
    values = np.random.default_rng(pairs).normal(size=(trials, pairs))
    return float(np.mean([low <= 0 <= high for low, high in map(interval, values)]))


def test_intervals_cover_the_truth_in_93_to_97_percent() -> None:
    assert 0.93 <= coverage(8, 600) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [7, 8, 12, 20])
def test_interval_coverage_of_many_pairs(pairs: int) -> None:
    assert 0.93 <= coverage(pairs, 4000) <= 0.97


@given(st.lists(st.floats(0.01, 10), min_size=6, max_size=7), st.sampled_from([0.05, ALPHA]))
@settings(max_examples=4)
def test_sign_changes_pass_at_most_at_rate_alpha(sizes: list[float], alpha: float) -> None:
    signs = itertools.product((1.0, -1.0), repeat=len(sizes))
    passed = [p_value(np.array(each) * sizes) <= alpha for each in signs]
    assert np.mean(passed) <= alpha


@given(st.lists(st.floats(-10, 10).map(lambda value: round(value, 3)), min_size=2, max_size=7))
@settings(max_examples=25)
def test_p_value_is_the_fraction_of_sign_changes(values: list[float]) -> None:
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
def test_smallest_effect_has_the_stated_power(pairs: int) -> None:
    """As in a verdict, detection requires both the test and the interval."""
    effect, found, trials = smallest_effect(pairs), 0, 250
    for values in np.random.default_rng(1).normal(effect, 1.0, (trials, pairs)):
        low, high = interval(values)
        found += p_value(values) <= ALPHA and (low > 0 or high < 0)
    assert 0.74 <= found / trials <= 0.86


def test_simulated_power_agrees_with_student_t() -> None:
    assert smallest_effect(10) == pytest.approx(smallest_effect(11), rel=0.12)
    assert power_of(0.0, 10) == pytest.approx(ALPHA, abs=0.01)
    effects = [smallest_effect(pairs) for pairs in range(7, 30)]
    assert effects == sorted(effects, reverse=True)


@pytest.mark.parametrize(("effect", "spread"), [(0.01, 0.005), (0.01, 0.01), (0.02, 0.1)])
def test_pairs_for_an_effect_are_the_fewest(effect: float, spread: float) -> None:
    pairs = pairs_for(effect, spread)
    assert smallest_effect(pairs) * spread <= effect
    assert pairs == least_pairs() or smallest_effect(pairs - 1) * spread > effect


def test_tiny_effect_needs_the_most_pairs() -> None:
    assert pairs_for(1e-6, 1.0) == pairs_for(0.0, 1.0) == MOST_PAIRS


def test_equal_pairs_have_a_point_interval() -> None:
    found = paired([0.0] * 8)
    assert (found.mean, found.low, found.high, found.p, found.smallest_effect) == (0, 0, 0, 1, 0)
    assert paired([0.5] * 8).low == 0.5


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_empty_or_infinite_differences_are_refused(values: list[float]) -> None:
    with pytest.raises(UsageError):
        paired(values)
