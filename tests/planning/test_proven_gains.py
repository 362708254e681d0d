"""Techniques that change the result are planned if a comparison proved a gain that holds with this machine's steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planned_runs import CATALOGUE, PLANNER, by_expectation, formula, on_a_clock, recipe, searching

from thrifty.composition.compose import Run
from thrifty.core.footprint import Footprint
from thrifty.core.recipe import ModelSettings, ObjectiveSettings
from thrifty.core.technique import Numerics
from thrifty.core.user_objects import PythonObjects
from thrifty.experiments.past_results import OWN, OWN_RESULTS, PastComparison, past_comparisons
from thrifty.interface.plan_evidence import proven_gains
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.forecast import PlanRequest
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.probe_jobs import ProbeError
from thrifty.planning.proven_gains import ProvenGain

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


def planned(ratio: float, some: list[ProvenGain], **how: Any) -> PlanCandidate:
    """Plan with steps of Muon that take `ratio` times the steps of AdamW. Other options are as fast as expected."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        seconds = math.prod(option.factor for option in candidate.options if option.relative_steps == 1)
        seconds *= ratio if "optimizers.muon" in names(candidate) else 1.0
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,))

    memory = how.pop("memory", math.inf)
    return searching(memory, Numerics.DIFFERENT, gains=some, **({"time": time} | how)).run()


def names(candidate: PlanCandidate) -> set[str]:
    return {technique.name for technique in candidate.techniques}


def test_gain_is_steps_to_equal_loss_with_scaled_rates() -> None:
    (gain,) = gains()
    assert gain.option.relative_steps == pytest.approx(0.5)
    (muon,) = gain.option.techniques
    own = next(technique for technique in RECIPE.techniques if technique.name == "optimizers.adamw").lr  # type: ignore[attr-defined]
    assert (muon.lr, muon.adamw_lr) == pytest.approx((4 * own, 2 * own))  # type: ignore[attr-defined]
    assert gain.option.drops == {"optimizers.adamw"} and gain.option.numerics is Numerics.DIFFERENT


def test_proven_technique_replaces_the_other_if_steps_are_fast() -> None:
    assert "optimizers.muon" in names(planned(1.9, gains())) and "optimizers.adamw" not in names(planned(1.9, gains()))
    assert "optimizers.muon" not in names(planned(2.1, gains()))


def test_gains_are_combined_with_faster_steps() -> None:
    plain, best = planned(1.0, []), planned(1.0, gains())
    assert "compile" in names(plain) and {*best.options} - {*plain.options} == {gains()[0].option}


def test_slow_gains_do_not_hide_faster_steps() -> None:
    """Candidates with the gain would be expected to be best, but their measured steps are slow."""
    assert planned(9.0, gains(), finalists=2).options == planned(1.0, [], finalists=2).options


def test_short_planning_still_measures_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    _, how = on_a_clock(monkeypatch, lambda candidate: 35.0 if candidate.is_compiled else 8.0)
    assert "optimizers.muon" in names(planned(1.0, gains(), began=0.0, allowance=lambda step: 60.0, **how))


def test_slow_gains_are_not_taken_if_the_recipe_does_not_fit() -> None:
    assert "optimizers.muon" in names(planned(1.0, gains(), memory=700.0))
    assert "optimizers.muon" not in names(planned(9.0, gains(), memory=700.0))

    def leaner(run: Run) -> Footprint:
        """Muon alone fits, but not the recipe."""
        has_muon = any(technique.name == "optimizers.muon" for technique in run.techniques)
        return replace(formula(run), optimizer=0.0) if has_muon else formula(run)

    assert "optimizers.muon" not in names(planned(9.0, gains(), memory=1000.0, count=leaner))


def test_gain_whose_probe_fails_is_refused() -> None:
    probes: list[PlanCandidate] = []

    def failing(candidate: PlanCandidate, bar: float) -> StepTiming:
        if "optimizers.muon" in names(candidate):
            probes.append(candidate)
            raise ProbeError("its process ended with exit code 1")
        return by_expectation(candidate)

    assert planned(1.0, gains(), time=failing).options == planned(1.0, [], time=by_expectation).options
    assert len(probes) == 1


def test_one_gain_is_taken_because_two_are_not_proven_together() -> None:
    lion = gains(technique="optimizers.lion", steps_to_quality=0.7, settings={})
    both = [*lion, *gains()]
    assert "optimizers.muon" in names(planned(1.0, both)) and "optimizers.lion" not in names(planned(1.0, both))
    assert "optimizers.lion" in names(planned(9.0, both))


def test_gain_of_the_similar_model_is_taken() -> None:
    small, own = gains(parameters=100_000, steps_to_quality=0.1), gains(steps_to_quality=0.6)
    (chosen,) = [option for option in planned(1.0, [*small, *own]).options if option.relative_steps < 1]
    assert chosen.relative_steps == pytest.approx(0.6)


def test_shorter_steps_may_outweigh_a_larger_number_of_steps() -> None:
    some = gains(steps_to_quality=1.25, step_time=0.5)
    assert "optimizers.muon" in names(planned(0.5, some)) and "optimizers.muon" in names(planned(1.0, some, time=None))
    assert "optimizers.muon" not in names(planned(0.9, some))


def test_gains_are_taken_without_probes() -> None:
    assert "optimizers.muon" in names(planned(1.0, gains(), time=None))


def test_gain_that_does_not_fit_is_not_taken() -> None:
    def larger(run: Run) -> Footprint:
        has_muon = any(technique.name == "optimizers.muon" for technique in run.techniques)
        return replace(formula(run), parameters=1e30) if has_muon else formula(run)

    assert "optimizers.muon" in names(planned(1.0, gains(), memory=1e9))
    assert "optimizers.muon" not in names(planned(1.0, gains(), memory=1e9, count=larger))


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
        {"has_learned": False},
    ],
    ids=str,
)
def test_other_comparisons_prove_no_gain(changes: dict[str, Any]) -> None:
    assert gains(**changes) == []


def test_gain_that_a_similar_comparison_refutes_is_not_proven() -> None:
    for parameters, count in ((20_000_000, 0), (900_000_000, 1)):
        worse = replace(MUON, verdict="worse", parameters=parameters)
        assert len(proven_gains([MUON, worse], RECIPE, CATALOGUE)) == count


def test_recipes_with_other_objectives_or_weights_get_no_gain() -> None:
    images = replace(RECIPE, objective=ObjectiveSettings("image_label"))
    pretrained = replace(RECIPE, model=ModelSettings(folder="model"))
    module = replace(RECIPE, model=ModelSettings(build="Net", weights="given"))
    own_loss = replace(RECIPE, python=PythonObjects(data="package:rows", loss="package:loss"))
    for other in (images, pretrained, module, own_loss):
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


def test_plan_in_time_is_preferred_to_a_late_gain() -> None:
    """The gain halves the steps to equal loss, but a budget of tokens has the same number of slower steps."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        seconds = 1.5 if "optimizers.muon" in names(candidate) else 1.0
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,))

    parameters = sum(parameter.numel() for parameter in PLANNER.plain.build().parameters())
    shared = {"recipe": RECIPE, "gains": gains(parameters=parameters), "seconds": 1e6, "time": time}
    for limit, is_taken in ((1e6, True), (130.0, False)):
        request = PlanRequest(allow=Numerics.DIFFERENT, memory=1e12, tokens=100 * 8 * 16, seconds=limit)
        chosen = replace(PLANNER, request=request, **shared).plan().chosen
        assert ("optimizers.muon" in names(chosen)) is is_taken


def test_kept_comparison_of_muon_proves_a_gain() -> None:
    """Settings in files are plain data, such as lists for tuples."""
    kept = [each for each in past_comparisons(OWN_RESULTS) if each.technique == "optimizers.muon"]
    (gain,) = proven_gains(kept, RECIPE, CATALOGUE)
    assert gain.option.techniques[0].name == "optimizers.muon" and gain.option.relative_steps < 0.5
