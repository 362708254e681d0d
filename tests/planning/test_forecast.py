"""Forecasts: intervals with noise, for probed and for counted plans."""

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


def test_noisy_probes_have_positive_bounds() -> None:
    result = PLANNER.forecast(candidate(replace(TIMING, spread=0.7)), Budget(steps=10), NONE)
    assert 0 < result.step.low < result.step.value == 1.25 < result.step.high == pytest.approx(1.25 * 2.4)
    assert 0 < result.tokens_per_second.low < result.tokens_per_second.value < result.tokens_per_second.high


def test_a_time_budget_counts_the_whole_run_or_its_steps() -> None:
    planner = replace(PLANNER, loading=4.0)
    whole = planner.forecast(candidate(TIMING), Budget(seconds=1017.0), NONE)
    # the start, an evaluation and a checkpoint take 17 s, four timed steps 5 s, nine more evaluations 90 s
    assert whole.steps.value == (1017 - 17 - 4 - 5 - 90) / 1.25
    assert whole.seconds.low == whole.seconds.high == 1017
    steps = planner.forecast(candidate(TIMING), Budget(seconds=1000.0, counts="training"), NONE)
    aside = 10.0 / PLANNER.recipe.evaluation.every + 2.0 / PLANNER.recipe.checkpoints.every
    assert steps.steps.value == 800
    assert steps.seconds.value == 1017 and steps.seconds.high == pytest.approx(1017 + aside * steps.steps.high)


def test_the_process_of_a_run_may_exceed_that_of_its_probe() -> None:
    result = replace(PLANNER.forecast(candidate(TIMING), Budget(steps=10), NONE), process=100.0)
    assert result.peak.value == result.memory.value + 100
    assert result.peak.low == result.memory.low + 95 and result.peak.high == pytest.approx(result.memory.high + 110)


def test_compiler_memory_widens_the_lower_bound() -> None:
    assert PLANNER.forecast(candidate(TIMING), Budget(steps=1), NONE).memory.low == 270
    result = PLANNER.forecast(candidate(TIMING, "compile"), Budget(steps=1), NONE).memory
    assert result.value == 300 and result.low == pytest.approx(180)


def test_plans_beyond_the_time_limit_are_refused_with_a_fix() -> None:
    search = searching(math.inf, time=lambda candidate, bar: TIMING)
    planner = replace(PLANNER, request=PlanRequest(tokens=1e12, seconds=36.0))
    forecast = planner.forecast(search.run(), Budget(tokens=1e12), NONE)
    with pytest.raises(InfeasibleError, match=r"the limit is 0\.01 h") as error:
        planner.request.refuse_late(forecast.seconds)
    assert "--hours" in error.value.fix
    planner = replace(PLANNER, request=PlanRequest(tokens=1e12, seconds=1.1 * forecast.seconds.value))
    planner.request.refuse_late(forecast.seconds)


@pytest.mark.parametrize(
    ("plan_request", "what", "fix"),
    [
        (
            PlanRequest(tokens=16 * BATCH - 1.0),
            f"tokens is less than one step of {16 * BATCH}",
            f"--tokens {16 * BATCH}",
        ),
        (PlanRequest(seconds=17.5), r"startup takes about 17 s and a step takes 1\.25 s", "--hours"),
    ],
)
def test_budgets_below_one_step_are_refused_with_a_fix(plan_request: PlanRequest, what: str, fix: str) -> None:
    candidates = searching(math.inf, time=lambda candidate, bar: TIMING)
    budget = plan_request.budget(PLANNER.recipe.budget, 1.0)
    result = PLANNER.forecast(candidates.run(), budget, NONE)
    with pytest.raises(InfeasibleError, match=what) as error:
        refuse_no_step(budget, result.steps.value, result.step.value, 16.0 * BATCH, result.startup)
    assert fix in error.value.fix
    refuse_no_step(Budget(seconds=20.0), 2.0, 1.25, 16.0 * BATCH, 17.0)


def test_counted_forecasts_do_not_use_the_ledger() -> None:
    past: Mapping[str, PredictionRecord] = {name: PredictionRecord((3.0,) * 9) for name in NONE}
    result = PLANNER.forecast(candidate(None), Budget(steps=1), past)
    assert result.memory.value == 200 and result.memory.high == pytest.approx(220)
    assert result.step.value == 1.25 and result.step.high == pytest.approx(3.75)


def test_cached_probes_distinguish_models_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_table_and_reasons_have_the_same_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(candidate: PlanCandidate, bar: float) -> StepTiming:
        """Return step times with slow outliers. Candidates with more changes have more outliers."""
        least = 1.0 + 0.01 * len(candidate.options)
        return replace(TIMING, passes=(least * (1.0 + 0.17 * len(candidate.options)),), least=(least,))

    monkeypatch.setattr(planner, "AXES", {"number format": planner.AXES["number format"]})
    monkeypatch.setattr(search_space, "has_fast_bfloat16", lambda device: True)
    plan = replace(PLANNER, request=PlanRequest(allow=Numerics.DIFFERENT), time=noisy, seconds=math.inf).plan()
    steps = {candidate.label: forecast.step.value for candidate, forecast in plan.alternatives}
    explainer = [
        re.search(r"a step with (.+) takes ([\d.]+) times the plan's time", reason.why) for reason in plan.reasons
    ]
    ratios = {match[1]: match[2] for match in explainer if match}
    assert ratios and all(f"{steps[name] / steps[plan.chosen.label]:.2f}" == ratios[name] for name in ratios)


def test_number_formats_fit_the_planned_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for cluster, units in (("h100-box", True), ("dgx-1-v100", False)):
        with units_of(cluster):
            offered = {
                name for option in _formats("cpu") for name in (technique.name for technique in option.techniques)
            }
            assert ("precision.mixed" in offered) == units
            assert any(isinstance(technique, MixedPrecision) for technique in text_techniques(1e-3)) == units
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **how: False)
    assert not has_fast_bfloat16("cuda") and not _formats("cuda")


def _formats(device: str) -> list[PlanOption]:
    plain = plain_run(batch=BATCH)
    return allowed_options(PLANNER.recipe, plain, CATALOGUE, Numerics.DIFFERENT, device)[0].get("number format", [])
