"""Minima of the loss per budget, and the fitted optimal size."""

import numpy as np
import pytest

from thrifty.core.errors import UsageError
from thrifty.planning.isoflop_analysis import budgets, find_valley, isoflop
from thrifty.planning.scaling_law import ScalingLaw
from thrifty.planning.scaling_law_fit import TrainedRun, synthetic_runs

LAW = ScalingLaw(E=1.5, A=60.0, B=200.0, alpha=0.3, beta=0.35)
BUDGETS = np.geomspace(1e14, 1e17, 4)


def around(flops: float, span: float = 1.5, noise: float = 0.0, seed: int = 0) -> list[TrainedRun]:
    """Return runs of seven sizes around the optimum."""
    sizes = LAW.optimal(flops).parameters * np.exp(np.linspace(-span, span, 7))
    return list(synthetic_runs(LAW, sizes, [flops], noise, seed))


def test_minima_of_a_law_and_their_exponent() -> None:
    result = isoflop([run for flops in BUDGETS for run in around(flops)])
    assert [valley.flops for valley in result.valleys] == pytest.approx(BUDGETS)
    for valley in result.valleys:
        assert valley.parameters == pytest.approx(LAW.optimal(valley.flops).parameters, rel=0.03)
        assert valley.loss == pytest.approx(LAW.optimal(valley.flops).loss, rel=0.01)
    assert result.exponent == pytest.approx(LAW.size_exponent, abs=1e-6)
    assert result.parameters(1e16) == pytest.approx(LAW.optimal(1e16).parameters, rel=0.03)
    assert not result.refused


def test_exact_parabolas_are_recovered() -> None:
    runs = [TrainedRun(size, 1e15 / 6 / size, 2 + 0.1 * np.log(size / 3e6) ** 2) for size in (1e6, 2e6, 4e6, 8e6)]
    valley = find_valley(runs)
    assert not isinstance(valley, str)
    assert valley.parameters == pytest.approx(3e6) and valley.loss == pytest.approx(2)
    assert valley.curvature == pytest.approx(0.1)
    assert valley.interval is not None and valley.interval.low == pytest.approx(valley.interval.high)


def test_coverage_of_intervals() -> None:
    sizes = exponents = 0
    for seed in range(40):
        runs = [run for i, flops in enumerate(BUDGETS) for run in around(flops, 1.0, 0.004, 100 * seed + i)]
        result = isoflop(runs)
        interval = result.exponent_interval
        assert interval is not None
        exponents += interval.low <= LAW.size_exponent <= interval.high
        for valley in result.valleys:
            assert valley.interval is not None
            sizes += valley.interval.low <= LAW.optimal(valley.flops).parameters <= valley.interval.high
    assert exponents >= 34 and sizes >= 0.85 * 160


def test_similar_budgets_form_one_group() -> None:
    sizes = np.geomspace(1e6, 1e7, 5)
    runs = [run for i, size in enumerate(sizes) for run in synthetic_runs(LAW, [size], [1e15 * (1 + 0.01 * i)])]
    assert [len(group) for group in budgets([*runs, *around(1e16)])] == [5, 7]


def test_budgets_without_a_minimum_are_omitted_with_a_reason() -> None:
    best = LAW.optimal(1e13).parameters
    one_sided = synthetic_runs(LAW, best * np.array([4.0, 8.0, 16.0, 32.0]), [1e13])
    two_sizes = synthetic_runs(LAW, [1e6, 2e6], [1e12])
    result = isoflop([*one_sided, *two_sizes, *around(1e15), *around(1e16)])
    assert len(result.valleys) == 2 and result.exponent_interval is None
    assert "fewer than three sizes" in result.refused[0] and "at smaller sizes" in result.refused[1]


def test_one_budget_is_refused() -> None:
    with pytest.raises(UsageError, match="fewer than two budgets have a loss minimum: all runs have the same budget"):
        isoflop(around(1e15))
    upside_down = [TrainedRun(run.parameters, run.tokens, 10 - run.loss) for run in around(1e16)]
    with pytest.raises(UsageError, match="the loss has no minimum over model size"):
        isoflop([*around(1e15), *upside_down])
