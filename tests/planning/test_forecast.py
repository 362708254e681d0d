"""Forecasts: intervals that make sense on a busy machine, of plans that were run and of those only counted."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planned_runs import BATCH, CATALOGUE, NONE, PLANNER, TIMING, candidate, searching
from tiny_runs import plain_run

from thrifty.core.errors import InfeasibleError
from thrifty.core.recipe import Budget
from thrifty.core.technique import Numerics
from thrifty.interface.plans import units_of
from thrifty.machine.cpu_features import has_fast_bfloat16
from thrifty.planning import planner, search_space
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.forecast import PlanRequest, refuse_no_step
from thrifty.planning.forecast_ledger import PredictionRecord
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.planner import allowed_options
from thrifty.planning.probe_jobs import ProbeJob, cache_probe
from thrifty.planning.search_space import PlanOption
from thrifty.recipes.language_recipes import text_techniques
from thrifty.techniques.precision.mixed import MixedPrecision


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


@pytest.mark.slow
def test_the_table_and_the_reasons_name_the_same_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(candidate: PlanCandidate, bar: float) -> StepTiming:
        """Steps of which single ones take longer, of some candidates more than of others."""
        least = 1.0 + 0.01 * len(candidate.ways)
        return replace(TIMING, passes=(least * (1.0 + 0.17 * len(candidate.ways)),), least=(least,))

    monkeypatch.setattr(planner, "AXES", {"number format": planner.AXES["number format"]})
    monkeypatch.setattr(search_space, "has_fast_bfloat16", lambda device: True)
    plan = replace(PLANNER, wanted=PlanRequest(allow=Numerics.DIFFERENT), time=noisy, seconds=math.inf).plan()
    steps = {candidate.label: forecast.step.value for candidate, forecast in plan.alternatives}
    told = [re.search(r"a step with (.+) takes ([\d.]+) of the plan's time", reason.why) for reason in plan.reasons]
    ratios = {match[1]: match[2] for match in told if match}
    assert ratios and all(f"{steps[name] / steps[plan.chosen.label]:.2f}" == ratios[name] for name in ratios)


def test_number_formats_are_those_of_the_device_that_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for cluster, units in (("h100-box", True), ("dgx-1-v100", False)):
        with units_of(cluster):
            offered = {name for way in _formats("cpu") for name in (technique.name for technique in way.techniques)}
            assert ("precision.mixed" in offered) == units
            assert any(isinstance(technique, MixedPrecision) for technique in text_techniques(1e-3)) == units
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: False)
    assert not has_fast_bfloat16("cuda") and not _formats("cuda")


def _formats(device: str) -> list[PlanOption]:
    plain = plain_run(batch=BATCH)
    return allowed_options(PLANNER.recipe, plain, CATALOGUE, Numerics.DIFFERENT, device)[0].get("number format", [])
