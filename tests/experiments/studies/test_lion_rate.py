"""Study of Lion: the best rate of a grid, and the comparison of two optimizers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from thrifty.experiments import studies
from thrifty.experiments.studies import lion_rate
from thrifty.experiments.studies.lion_rate import RATES, RATIO, lowest_point
from thrifty.experiments.study import Cells
from thrifty.experiments.study_summary import cells_of


def valley(rate: float, best: float, lowest: float) -> float:
    return lowest + 0.3 * math.log(rate / best) ** 2


@given(some.sampled_from(sorted(RATES)), some.floats(0.1, 0.9), some.floats(0.5, 3))
def test_the_minimum_of_a_parabola_is_found(optimizer: lion_rate.Optimizer, place: float, lowest: float) -> None:
    rates = RATES[optimizer]
    best = rates[1] * (rates[-2] / rates[1]) ** place
    rate, loss = lowest_point(rates, [valley(rate, best, lowest) for rate in rates])
    assert rate == pytest.approx(best, rel=1e-6)
    assert loss == pytest.approx(lowest, abs=1e-9)


@pytest.mark.parametrize("losses", [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 1.0, math.inf]])
def test_the_best_grid_rate_is_used_without_finite_neighbors(losses: list[float]) -> None:
    rate, loss = lowest_point([1e-3, 2e-3, 4e-3], losses)
    assert loss == 1.0
    assert rate == [1e-3, 2e-3, 4e-3][losses.index(1.0)]


def seed_of_runs(adamw: float, lion: float) -> Cells:
    study = studies.make("lion_rate")
    best = {"adamw": (adamw, 2.0), "lion": (lion, 2.1)}
    measured = {
        (label, 0): {"loss": valley(case["rate"], *best[case["optimizer"]])} for label, case in study.cases.items()
    }
    return cells_of(study, measured)[0]


def test_the_ratio_of_the_optima_is_derived_and_compared() -> None:
    expected = studies.make("lion_rate").expect
    cells = seed_of_runs(adamw=8e-3, lion=2e-3)
    assert cells[RATIO]["rate_ratio"] == pytest.approx(4, rel=1e-6)
    assert cells[RATIO]["loss_difference"] == pytest.approx(0.1)
    assert all(holds(cells) for holds in expected.values())
    at_an_end = seed_of_runs(adamw=8e-3, lion=1e-4)
    assert at_an_end["best of lion"]["inside"] == 0
    assert [holds(at_an_end) for holds in expected.values()] == [False, False, True]


def test_a_small_cell_of_each_optimizer_learns() -> None:
    tiny = {"depth": 1, "width": 16, "length": 16, "batch": 4}
    for optimizer, rates in RATES.items():
        first, later = (lion_rate.measure(0, optimizer, rates[-2], steps=steps, **tiny)["loss"] for steps in (1, 25))
        assert later < first - 0.3
