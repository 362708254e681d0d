"""Means, intervals, and verdicts on expectations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy import stats
from tiny_studies import levels

from thrifty.core.errors import UsageError
from thrifty.experiments.study_summary import estimate, judge_expectations, summarize


@given(some.lists(some.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_the_interval_is_students_t(values: list[float]) -> None:
    found = estimate(values)
    half_width = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    assert found.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert found.half_width == pytest.approx(half_width, rel=1e-6, abs=1e-6)


def test_the_widened_interval_has_its_nominal_coverage() -> None:
    draw = np.random.default_rng(0).normal(size=(4000, 5 + 3))
    kept = [estimate(list(row[:5])) for row in draw]
    inside = [
        abs(found.mean - row[5:].mean()) <= found.half_width_for(3) for found, row in zip(kept, draw, strict=True)
    ]
    assert 0.94 < np.mean(inside) < 0.96


def test_one_seed_has_a_mean_and_no_interval() -> None:
    found = estimate([2.5])
    assert found.mean == 2.5
    assert math.isnan(found.half_width)


def test_one_infinite_run_makes_the_mean_infinite() -> None:
    found = estimate([1.0, math.inf, 2.0])
    assert (found.mean, found.never, found.runs) == (math.inf, 1, 3)
    assert math.isnan(found.half_width)


MEASURED = {
    (label, seed): {"height": level + shift}
    for seed, shift in enumerate((0.0, 0.1, -0.1))
    for label, level in (("one", 1.0), ("two", 2.0 - 1.5 * (seed == 2)), ("three", 3.0))
}


def test_expectations_are_judged_on_means_and_each_seed() -> None:
    higher, lower, unknown = judge_expectations(levels(), MEASURED)
    assert (higher.verdict, higher.held, higher.seeds) == ("holds", 2, 3)
    assert (lower.verdict, lower.held, lower.seeds) == ("does not hold", 1, 3)
    assert (unknown.verdict, unknown.held, unknown.seeds) == ("open", 0, 0)


def test_an_error_in_an_expectation_is_raised() -> None:
    from dataclasses import replace

    broken = replace(levels(), expect={"is nothing": lambda c: 1 / 0 > 0})
    with pytest.raises(ZeroDivisionError):
        judge_expectations(broken, MEASURED)


def test_rows_are_derived_for_seeds_with_all_cases() -> None:
    part = {place: numbers for place, numbers in MEASURED.items() if place != ("three", 1)}
    found = summarize(levels(), part)["two over one"]["height"]
    assert found.runs == 2
    assert found.mean == pytest.approx((1.0 - 0.5) / 2)


def test_an_unknown_quantity_is_an_error() -> None:
    with pytest.raises(UsageError, match="'depth' is not a quantity of the study"):
        summarize(levels(), {("one", 0): {"depth": 1.0}})
