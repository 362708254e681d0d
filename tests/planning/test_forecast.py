"""Forecasts: intervals that make sense on a busy machine, of plans that were run and of those only counted."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from planned_runs import BATCH, NONE, PLANNER, TIMING, candidate, searching

from thrifty.core.errors import InfeasibleError
from thrifty.core.recipe import Budget
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.forecast import refuse_no_step
from thrifty.planning.forecast_ledger import PredictionRecord
from thrifty.planning.planner import PlanRequest
from thrifty.planning.probe_jobs import ProbeJob, cache_probe


def test_however_noisy_a_probe_was_a_step_takes_time() -> None:
    found = PLANNER.forecast(candidate(replace(TIMING, spread=0.7)), Budget(steps=10), NONE)
    assert 0 < found.step.low < found.step.value == 1.25 < found.step.high == pytest.approx(1.25 * 2.4)
    assert 0 < found.tokens_per_second.low < found.tokens_per_second.value < found.tokens_per_second.high


def test_evaluations_and_checkpoints_come_on_top_of_a_budget_of_seconds() -> None:
    found = PLANNER.forecast(candidate(TIMING), Budget(seconds=1017.0), NONE)
    assert found.steps.value == 800  # starting, an evaluation and a checkpoint take 17 s
    aside = 10.0 / PLANNER.recipe.evaluation.every + 2.0 / PLANNER.recipe.checkpoints.every
    assert found.seconds.value == 1017 and found.seconds.high == pytest.approx(1017 + aside * found.steps.high)


def test_what_a_compiler_held_may_be_cached_when_the_run_starts() -> None:
    assert PLANNER.forecast(candidate(TIMING), Budget(steps=1), NONE).memory.low == 270
    found = PLANNER.forecast(candidate(TIMING, "compile"), Budget(steps=1), NONE).memory
    assert found.value == 300 and found.low == pytest.approx(180)


def test_what_takes_longer_than_it_may_is_refused_with_what_would_do() -> None:
    search = searching(math.inf, time=lambda candidate, bar: TIMING)
    planner = replace(PLANNER, wanted=PlanRequest(tokens=1e12, seconds=36.0))
    forecast = planner.forecast(search.run(), Budget(tokens=1e12), NONE)
    with pytest.raises(InfeasibleError, match=r"and may take 0\.01 h") as error:
        planner.wanted.refuse_late(forecast.seconds)
    assert "--hours" in error.value.fix
    planner = replace(PLANNER, wanted=PlanRequest(tokens=1e12, seconds=1.1 * forecast.seconds.value))
    planner.wanted.refuse_late(forecast.seconds)


@pytest.mark.parametrize(
    ("wanted", "what", "fix"),
    [
        (
            PlanRequest(tokens=16 * BATCH - 1.0),
            f"tokens does not fit one step of {16 * BATCH}",
            f"--tokens {16 * BATCH}",
        ),
        (PlanRequest(seconds=17.5), r"starting is forecast to take 17 s and a step 1\.25 s", "--hours"),
    ],
)
def test_a_budget_below_one_step_is_refused_with_what_would_pay_for_one(
    wanted: PlanRequest, what: str, fix: str
) -> None:
    candidates = searching(math.inf, time=lambda candidate, bar: TIMING)
    budget = wanted.budget(PLANNER.recipe.budget, 1.0)
    found = PLANNER.forecast(candidates.run(), budget, NONE)
    with pytest.raises(InfeasibleError, match=what) as error:
        refuse_no_step(budget, found.steps.value, found.step.value, 16.0 * BATCH, found.startup)
    assert fix in error.value.fix
    refuse_no_step(Budget(seconds=20.0), 2.0, 1.25, 16.0 * BATCH, 17.0)


def test_what_was_only_counted_is_not_judged_by_what_processes_held() -> None:
    past: Mapping[str, PredictionRecord] = {name: PredictionRecord((3.0,) * 9) for name in NONE}
    found = PLANNER.forecast(candidate(None), Budget(steps=1), past)
    assert found.memory.value == 200 and found.memory.high == pytest.approx(220)
    assert found.step.value == 1.25 and found.step.high == pytest.approx(3.75)


def test_a_kept_probe_is_not_taken_for_that_of_another_model_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THRIFTY_CACHE", str(tmp_path))
    made: list[ProbeJob] = []

    def probe(job: ProbeJob) -> StepTiming:
        made.append(job)
        return replace(TIMING, update=float(len(made)))

    job = ProbeJob({"name": "a", "model": {"folder": "model"}}, 10, (BATCH,), 1, 1.0, (5.0, 6.0))
    once = cache_probe(probe, "cpu")
    assert once(job) == once(replace(job, recipe={**job.recipe, "name": "b"})) and len(made) == 1
    assert once(replace(job, counted=(50.0, 60.0))).update == 2.0
