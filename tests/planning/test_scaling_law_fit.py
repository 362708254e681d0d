"""Fits recover the law of synthetic runs, the published early stop does not, and degenerate runs are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import check_grad

from thrifty.core.errors import UsageError
from thrifty.planning.published_laws import BEST
from thrifty.planning.scaling_law import ScalingLaw
from thrifty.planning.scaling_law_fit import (
    COARSE_STARTS,
    DELTA,
    PAPER_STARTS,
    FitProcedure,
    LawFit,
    TrainedRun,
    fit,
    huber_objective,
    synthetic_runs,
)

SIZES, BUDGETS = np.geomspace(6e7, 1.6e10, 12), np.geomspace(6e18, 3e21, 8)
"""Sizes and budgets over the range of Hoffmann et al."""
SMALL_SIZES, SMALL_BUDGETS = np.geomspace(3e5, 3e7, 5), np.geomspace(1e13, 1e16, 4)
"""Sizes and budgets of runs on a laptop."""
SMALL = ScalingLaw(E=1.5, A=60.0, B=200.0, alpha=0.3, beta=0.35)

constants = st.tuples(
    st.floats(0, 10), st.floats(0, 10), st.floats(-1, 1), st.floats(0.1, 1), st.floats(0.1, 1)
).map(np.array)  # fmt: skip


def logs(runs: tuple[TrainedRun, ...]) -> np.ndarray:
    return np.log([[run.parameters, run.tokens, run.loss] for run in runs]).T


@pytest.fixture(scope="module")
def noiseless() -> tuple[TrainedRun, ...]:
    return synthetic_runs(BEST.law, SIZES, BUDGETS)


@pytest.fixture(scope="module")
def converged(noiseless: tuple[TrainedRun, ...]) -> LawFit:
    return fit(noiseless)


@given(constants)
def test_objective_and_gradient_equal_autograd(at: np.ndarray) -> None:
    log_n, log_d, log_loss = logs(synthetic_runs(SMALL, SMALL_SIZES, SMALL_BUDGETS, noise=0.01))
    value, gradient = huber_objective(at, log_n, log_d, log_loss)
    free = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    terms = torch.stack(
        [
            free[0] - free[3] * torch.from_numpy(log_n),
            free[1] - free[4] * torch.from_numpy(log_d),
            free[2].expand(len(log_n)),
        ]
    )
    predicted = torch.logsumexp(terms, dim=0)
    loss = torch.nn.functional.huber_loss(predicted, torch.from_numpy(log_loss), reduction="sum", delta=DELTA)
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-12)
    assert free.grad is not None
    assert gradient == pytest.approx(free.grad.numpy(), rel=1e-9, abs=1e-15)


def test_gradient_equals_finite_differences() -> None:
    data = logs(synthetic_runs(SMALL, SMALL_SIZES, SMALL_BUDGETS, noise=0.01))
    at = SMALL.logs() + 0.1
    error = check_grad(lambda x: huber_objective(x, *data)[0], lambda x: huber_objective(x, *data)[1], at)
    assert error < 1e-5 * np.linalg.norm(huber_objective(at, *data)[1])


@pytest.mark.slow
def test_noiseless_runs_recover_the_constants(converged: LawFit) -> None:
    assert converged.law.logs() == pytest.approx(BEST.law.logs(), rel=1e-3)
    for name in ("A", "B"):
        assert getattr(converged.law, name) == pytest.approx(getattr(BEST.law, name), rel=1e-3)
    assert converged.objective < 1e-15 and converged.residual < 1e-6
    assert converged.starts == len(COARSE_STARTS) and converged.agreeing > converged.starts / 2
    assert converged.draws is None


@pytest.mark.slow
def test_small_runs_recover_their_constants() -> None:
    result = fit(synthetic_runs(SMALL, SMALL_SIZES, SMALL_BUDGETS))
    assert result.law.logs() == pytest.approx(SMALL.logs(), rel=1e-3)


@pytest.mark.slow
def test_the_mean_of_losses_stops_before_the_minimum(noiseless: tuple[TrainedRun, ...], converged: LawFit) -> None:
    early = fit(noiseless, procedure=FitProcedure.STOPS_EARLY)
    assert early.objective > 1e6 * converged.objective and early.objective > 1e-5
    true, right, wrong = (law.optimal(5.76e23).tokens_per_parameter for law in (BEST.law, converged.law, early.law))
    assert right == pytest.approx(true, rel=1e-3)
    assert abs(np.log(wrong / true)) > np.log(1.3)


@pytest.mark.slow
def test_the_sum_ends_lower_than_the_mean_with_noise() -> None:
    runs = synthetic_runs(BEST.law, SIZES, BUDGETS, noise=0.01)
    summed, averaged = fit(runs), fit(runs, procedure=FitProcedure.STOPS_EARLY)
    assert summed.objective < 0.99 * averaged.objective
    assert summed.law.alpha == pytest.approx(BEST.law.alpha, abs=0.03)
    assert summed.law.beta == pytest.approx(BEST.law.beta, abs=0.03)


def test_grid_of_the_paper() -> None:
    assert PAPER_STARTS.shape == (4500, 5) and len(np.unique(PAPER_STARTS, axis=0)) == 4500
    assert [sorted(set(column)) for column in PAPER_STARTS.T] == [
        [0, 5, 10, 15, 20, 25],
        [0, 5, 10, 15, 20, 25],
        [-1, -0.5, 0, 0.5, 1],
        [0, 0.5, 1, 1.5, 2],
        [0, 0.5, 1, 1.5, 2],
    ]


@pytest.mark.slow
def test_one_failed_run_does_not_bend_the_law() -> None:
    runs = list(synthetic_runs(SMALL, SMALL_SIZES, SMALL_BUDGETS))
    runs[7] = TrainedRun(runs[7].parameters, runs[7].tokens, 1.5 * runs[7].loss)
    assert fit(runs).law.logs() == pytest.approx(SMALL.logs(), rel=0.01)


@pytest.mark.slow
def test_coverage_of_bootstrap_intervals() -> None:
    held = 0
    for seed in range(6):
        runs = synthetic_runs(SMALL, SMALL_SIZES, SMALL_BUDGETS, noise=0.005, seed=seed)
        draws = fit(runs, starts=SMALL.logs()[None], resamples=60).draws
        assert draws is not None and draws.without_optimum == 0
        interval = draws.interval(draws.law.size_exponent)
        assert interval is not None and interval.high - interval.low < 0.2
        held += interval.low <= SMALL.size_exponent <= interval.high
    assert held >= 4


def test_samples_are_reproducible_by_seed() -> None:
    first, again, other = (synthetic_runs(SMALL, SMALL_SIZES, SMALL_BUDGETS, 0.01, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [run.flops for run in first] == pytest.approx(np.tile(SMALL_BUDGETS, len(SMALL_SIZES)))
    result, same = (fit(first, SMALL.logs()[None], resamples=5, seed=3) for _ in range(2))
    assert result.draws is not None and same.draws is not None
    assert np.array_equal(result.draws.law.logs(), same.draws.law.logs())


@pytest.mark.parametrize(
    ("sizes", "budgets", "reason"),
    [
        ([1e6], [1e14], "1 runs cannot determine five constants"),
        ([1e6, 4e6], [1e14, 2e14, 4e14, 8e14], "2 different sizes"),
        (np.geomspace(1e6, 1e8, 9), [1e15], "the number of tokens is a function of the size"),
    ],
)
def test_degenerate_runs_are_refused_with_the_reason(sizes, budgets, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        fit(synthetic_runs(SMALL, sizes, budgets))
    assert refused.value.fix


@pytest.mark.slow
def test_equal_and_rising_losses_are_refused() -> None:
    runs = synthetic_runs(SMALL, SMALL_SIZES, SMALL_BUDGETS)
    with pytest.raises(UsageError, match="nearly the same loss"):
        fit([TrainedRun(run.parameters, run.tokens, 2.0) for run in runs])
    rising = [TrainedRun(run.parameters, run.tokens, 2 + 1e-2 * run.parameters**0.3) for run in runs]
    with pytest.raises(UsageError, match="does not fall as parameters grow"):
        fit(rising)


@pytest.mark.parametrize("loss", [0.0, -1.0, float("nan")])
def test_nonpositive_losses_are_refused(loss: float) -> None:
    with pytest.raises(UsageError, match="loss of a run"):
        TrainedRun(1e6, 1e8, loss)
