"""Chinchilla re-fit: the sum recovers the law of the runs, and derived rows are correct."""

import math

import numpy as np
import pytest

from thrifty.experiments import studies
from thrifty.experiments.studies import chinchilla_refit
from thrifty.experiments.studies.chinchilla_refit import as_printed, factor, isoflop_runs, measure
from thrifty.experiments.study_summary import cells_of
from thrifty.planning.published_laws import BEST, PUBLISHED


def test_runs_have_the_budgets_of_the_paper_and_follow_the_law() -> None:
    runs = isoflop_runs(BEST.law, 30, noise=0.0, seed=0)
    assert len(runs) == 240
    assert sorted({round(run.flops / 1e16) for run in runs}) == [round(c / 1e16) for c in chinchilla_refit.BUDGETS]
    assert all(2 <= run.tokens / run.parameters <= 300 for run in runs)
    assert all(run.loss == pytest.approx(BEST.law.loss(run.parameters, run.tokens)) for run in runs)
    assert isoflop_runs(BEST.law, 30, 0.0, 1) != runs


def test_noise_has_its_standard_deviation_and_varies_by_budget() -> None:
    clean, noisy = (isoflop_runs(BEST.law, 30, noise, seed=0) for noise in (0.0, 0.01))
    residuals = np.log([a.loss / b.loss for a, b in zip(noisy, clean, strict=True)]).reshape(8, 30)
    assert residuals.std() == pytest.approx(0.01, rel=0.15)
    assert not np.allclose(residuals[0], residuals[1])


def test_rounding_the_law_yields_the_printed_constants() -> None:
    printed, unrounded = (law.law for law in PUBLISHED[:2])
    assert as_printed(unrounded) == printed


def test_the_factor_is_symmetric_and_at_least_one() -> None:
    assert factor(2, 8) == pytest.approx(4) == factor(8, 2)
    assert factor(3, 3) == 1


@pytest.mark.slow
def test_one_cell_without_noise_shows_the_mistake() -> None:
    case = {"starts": "coarse", "noise": 0.0, "per_budget": 6}
    right, wrong = (measure(0, reduction, **case) for reduction in ("sum", "mean"))
    assert right["off_by"] == pytest.approx(1, abs=1e-3)
    assert right["tokens_per_parameter"] == pytest.approx(17.88, abs=0.01)
    assert right["agreeing"] > 0.5 > wrong["agreeing"]
    assert wrong["off_by"] > 1.1
    assert wrong["off_by"] == pytest.approx(math.exp(abs(math.log(wrong["tokens_per_parameter"] / 17.877))), rel=1e-3)


def test_published_rows_are_derived_and_expectations_can_fail() -> None:
    study = studies.make("chinchilla_refit")
    numbers = {
        label: {"off_by": 1.0 if case["reduction"] == "sum" else 3.0, "agreeing": float(case["reduction"] == "sum")}
        for label, case in study.cases.items()
    }
    cells = cells_of(study, {(label, 0): found for label, found in numbers.items()})[0]
    assert cells["Hoffmann, as printed"]["tokens_per_parameter"] == pytest.approx(93, abs=0.5)
    assert cells["re-fit"]["tokens_per_parameter"] == pytest.approx(17.9, abs=0.05)
    assert all(holds(cells) for holds in study.expect.values())
    cured = cells | {"mean, paper starts, no noise": {"off_by": 1.0, "agreeing": 1.0}}
    assert [holds(cured) for holds in study.expect.values()] == [True, False, True, False, True]
