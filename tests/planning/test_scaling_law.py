"""Optimal sizes by the scaling law: minimum loss, requested compute, and published values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from thrifty.core.errors import UsageError
from thrifty.planning.published_laws import BEST, BOOTSTRAP, PUBLISHED
from thrifty.planning.scaling_law import LawSamples, LawUncertainty, ScalingLaw, recommend

GOPHER = 5.76e23
"""Compute in FLOP at which the papers compare constants."""

laws = st.builds(
    ScalingLaw,
    E=st.floats(0.5, 3),
    A=st.floats(10, 3000),
    B=st.floats(10, 3000),
    alpha=st.floats(0.2, 0.6),
    beta=st.floats(0.2, 0.6),
)
budgets = st.floats(12, 26).map(lambda power: 10**power)


@given(laws, budgets)
def test_optimal_sizes_use_the_requested_compute(law: ScalingLaw, flops: float) -> None:
    best = law.optimal(flops)
    assert best.flops == pytest.approx(flops, rel=1e-14)
    assert best.tokens_per_parameter == pytest.approx(best.tokens / best.parameters)


@given(laws, budgets, st.floats(0.01, 3), st.sampled_from([-1, 1]))
def test_optimal_sizes_have_the_lowest_loss(law: ScalingLaw, flops: float, away: float, side: int) -> None:
    best = law.optimal(flops)
    assert best.loss == pytest.approx(law.loss(best.parameters, best.tokens), rel=1e-14)
    factor = np.exp(side * away)
    assert law.loss(best.parameters * factor, best.tokens / factor) > best.loss


@given(laws, budgets)
def test_optimal_model_for_tokens_equals_that_for_compute(law: ScalingLaw, flops: float) -> None:
    best = law.optimal(flops)
    assert law.optimal_for_tokens(best.tokens).parameters == pytest.approx(best.parameters, rel=1e-9)


@given(laws, budgets)
def test_optimal_size_grows_by_the_size_exponent(law: ScalingLaw, flops: float) -> None:
    growth = law.optimal(100 * flops).parameters / law.optimal(flops).parameters
    assert np.log(growth) / np.log(100) == pytest.approx(law.size_exponent)


@pytest.mark.parametrize(
    ("name", "ratio", "parameters", "exponent"),
    [
        ("Hoffmann, as printed", 93, 32.2e9, 0.452),
        ("Hoffmann, unrounded", 59, 40.4e9, 0.457),
        ("Epoch AI, published", 18.4, 72.2e9, 0.513),
        ("re-fit", 17.9, 73.2e9, 0.514),
    ],
)
def test_published_constants_give_the_published_sizes(
    name: str, ratio: float, parameters: float, exponent: float
) -> None:
    (row,) = [each for each in PUBLISHED if each.name == name]
    best = row.law.optimal(GOPHER)
    assert best.tokens_per_parameter == pytest.approx(ratio, rel=5e-3)
    assert best.parameters == pytest.approx(parameters, rel=2e-3)
    assert row.law.size_exponent == pytest.approx(exponent, abs=5e-4)


def test_intervals_contain_the_optimum() -> None:
    for row in PUBLISHED:
        result = row.recommend(flops=GOPHER)
        assert set(result.intervals) == {"parameters", "tokens", "tokens_per_parameter", "loss"}
        for name, interval in result.intervals.items():
            if row.uncertainty is None:
                assert interval is None
            else:
                assert interval is not None
                assert interval.low < getattr(result.sizing, name) < interval.high


def test_bootstrap_standard_errors_equal_published_ones() -> None:
    law = BOOTSTRAP.draw(BEST.law).law
    for name, error, tolerance in (("E", 0.026, 0.02), ("alpha", 0.015, 0.02), ("beta", 0.021, 0.05), ("A", 125, 0.05)):
        assert np.std(getattr(law, name)) == pytest.approx(error, rel=tolerance)
    assert 1000 < np.std(law.B) < 1400  # 1293; a normal distribution of log B has a shorter tail than the bootstrap


def test_independent_errors_make_intervals_useless() -> None:
    alone = LawUncertainty(BOOTSTRAP.standard_errors, np.eye(5).tolist(), "no correlations")
    together, apart = (
        recommend(BEST.law, each.draw(BEST.law), flops=GOPHER).intervals["tokens_per_parameter"]
        for each in (BOOTSTRAP, alone)
    )
    assert together is not None and apart is not None
    assert together.high / together.low < 6 and apart.high / apart.low > 500


def test_samples_without_an_optimum_are_omitted() -> None:
    rows = np.tile(BEST.law.logs(), (100, 1))
    rows[:2, 3] = -0.1
    few = LawSamples.from_logs(rows)
    assert few is not None and few.without_optimum == pytest.approx(0.02)
    assert few.interval(few.law.alpha) is not None
    rows[:4, 3] = np.nan
    many = LawSamples.from_logs(rows, failed=0)
    assert many is not None and many.without_optimum == pytest.approx(0.04) and many.interval(many.law.alpha) is None
    assert LawSamples.from_logs(rows[:4]) is None


def test_constants_round_trip_through_logarithms() -> None:
    assert ScalingLaw.from_logs(BEST.law.logs()).logs() == pytest.approx(BEST.law.logs(), rel=1e-15)


@pytest.mark.parametrize("amount", [0.0, -1e18, float("inf"), float("nan")])
def test_invalid_amounts_are_refused(amount: float) -> None:
    for ask in (BEST.law.optimal, BEST.law.optimal_for_tokens):
        with pytest.raises(UsageError, match="positive, finite"):
            ask(amount)


def test_laws_without_an_optimum_are_refused() -> None:
    with pytest.raises(UsageError, match="scaling law: alpha is"):
        ScalingLaw(E=1.0, A=1.0, B=1.0, alpha=-0.1, beta=0.3)
    with pytest.raises(UsageError, match="either flops or tokens"):
        recommend(BEST.law)
    flat = ScalingLaw(E=1.0, A=1.0, B=1e-300, alpha=1e-3, beta=1e-3)
    with pytest.raises(UsageError, match="no finite optimal size"):
        recommend(flat, flops=1e18)
