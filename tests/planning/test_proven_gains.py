"""Techniques that change the result are planned if a comparison proved a gain that holds with this machine's steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_runs import CATALOGUE, PLANNER, by_expectation, recipe, searching

from thrifty.core.recipe import ModelSettings, ObjectiveSettings
from thrifty.core.technique import Numerics
from thrifty.core.user_objects import PythonObjects
from thrifty.experiments.past_results import OWN, OWN_RESULTS, PastComparison, past_comparisons
from thrifty.interface.plan_evidence import proven_gains
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.forecast import PlanRequest
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.proven_gains import ProvenGain, add_proven_gains

MUON = PastComparison(
    technique="optimizers.muon",
    role="added",
    others=("optimizers.adamw",),
    alone=False,
    verdict="better",
    sentence="better: held-out loss lower by 0.4 (9 %)",
    relative=-0.09,
    equal="time",
    step_time=1.2,
    flops=1.0,
    peak_memory=0.9,
    time_to_quality=0.6,
    steps_to_quality=0.5,
    pairs=8,
    device="cpu",
    cpu="AMD EPYC",
    objective="next_token",
    is_pretrained=False,
    settings={"lr": 0.008, "adamw_lr": 0.004},
    baseline_rate=0.002,
    parameters=10_000_000,
    tokens=1e6,
    steps=400,
    file=Path("results/comparisons/muon/cpu.json"),
    variant="muon",
)
RECIPE = recipe(CATALOGUE["gradients.clip"]())


def gains(**changes: Any) -> list[ProvenGain]:
    return proven_gains([replace(MUON, **changes)], RECIPE, CATALOGUE)


def planned(ratio: float, some: list[ProvenGain], memory: float = math.inf) -> PlanCandidate:
    """Plan with steps of Muon that take `ratio` times the steps of AdamW."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        has_muon = any(technique.name == MUON.technique for technique in candidate.techniques)
        seconds = ratio if has_muon else 1.0
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,))

    search = searching(memory, Numerics.DIFFERENT, time=time)
    return add_proven_gains(search, search.run(), some)


def names(candidate: PlanCandidate) -> set[str]:
    return {technique.name for technique in candidate.techniques}


def test_gain_is_steps_to_equal_loss_with_scaled_rates() -> None:
    (gain,) = gains()
    assert gain.relative_steps == pytest.approx(0.5)
    (muon,) = gain.option.techniques
    own = next(technique for technique in RECIPE.techniques if technique.name == "optimizers.adamw").lr  # type: ignore[attr-defined]
    assert (muon.lr, muon.adamw_lr) == pytest.approx((4 * own, 2 * own))  # type: ignore[attr-defined]
    assert gain.option.drops == {"optimizers.adamw"} and gain.option.numerics is Numerics.DIFFERENT


def test_proven_technique_replaces_the_other_if_steps_are_fast() -> None:
    assert "optimizers.muon" in names(planned(1.9, gains())) and "optimizers.adamw" not in names(planned(1.9, gains()))
    assert "optimizers.muon" not in names(planned(2.1, gains()))


def test_gain_that_does_not_fit_is_not_taken() -> None:
    search = searching(math.inf, Numerics.DIFFERENT, time=by_expectation)
    chosen = search.run()
    search.processes.limit = 1.0
    assert add_proven_gains(search, chosen, gains()) is chosen


@pytest.mark.parametrize(
    "changes",
    [
        {"verdict": "worse"},
        {"verdict": "undecided"},
        {"role": "removed"},
        {"steps_to_quality": None},
        {"steps_to_quality": 1.3},
        {"technique": "growth.stacking", "others": (), "alone": True, "settings": {}},
        {"objective": "masked_token"},
        {"objective": OWN},
        {"is_pretrained": True},
        {"others": ("optimizers.sgd",)},
        {"others": ("optimizers.adamw", "compile")},
        {"technique": "optimizers.unknown"},
        {"settings": {"no_longer_a_setting": 1}},
    ],
    ids=str,
)
def test_other_comparisons_prove_no_gain(changes: dict[str, Any]) -> None:
    assert gains(**changes) == []


def test_recipes_with_other_objectives_or_weights_get_no_gain() -> None:
    images = replace(RECIPE, objective=ObjectiveSettings("image_label"))
    pretrained = replace(RECIPE, model=ModelSettings(folder="model"))
    own_loss = replace(RECIPE, python=PythonObjects(data="package:rows", loss="package:loss"))
    for other in (images, pretrained, own_loss):
        assert proven_gains([MUON], other, CATALOGUE) == []


def test_gain_of_another_model_size_is_not_taken() -> None:
    assert "optimizers.muon" not in names(planned(1.0, gains(parameters=200_000_000)))


@pytest.mark.parametrize(("ratio", "verdict", "why"), [(1.0, "added", MUON.sentence), (3.0, "not taken", "too slow")])
def test_plan_gives_a_reason_for_a_proven_gain(ratio: float, verdict: str, why: str) -> None:
    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        seconds = ratio if "optimizers.muon" in names(candidate) else 1.0
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,))

    parameters = sum(parameter.numel() for parameter in PLANNER.plain.build().parameters())
    planner = replace(
        PLANNER,
        recipe=RECIPE,
        request=PlanRequest(allow=Numerics.DIFFERENT, memory=1e12),
        gains=gains(parameters=parameters),
        seconds=1e6,
        evidence={"optimizers.muon": MUON.in_words()},
        time=time,
    )
    plan = planner.plan()
    reasons = {reason.technique: reason for reason in plan.reasons}
    assert reasons["optimizers.muon"].verdict == verdict and why in reasons["optimizers.muon"].why
    assert ("optimizers.muon" in names(plan.chosen)) == (verdict == "added")
    assert reasons["optimizers.adamw"].verdict == ("taken out" if verdict == "added" else "kept")


def test_kept_comparison_of_muon_proves_a_gain() -> None:
    """Settings in files are plain data, such as lists for tuples."""
    kept = [each for each in past_comparisons(OWN_RESULTS) if each.technique == "optimizers.muon"]
    (gain,) = proven_gains(kept, RECIPE, CATALOGUE)
    assert gain.option.techniques[0].name == "optimizers.muon" and gain.relative_steps < 0.5
