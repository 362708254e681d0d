"""Every technique of the catalogue has a reason, and the reason is the right one."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
from planned_runs import BATCH, CATALOGUE, by_expectation, formula, recipe, searching
from tiny_runs import plain_run

from thrifty.core.recipe import DataSettings
from thrifty.core.technique import Numerics, Technique
from thrifty.machine.cpu_features import has_fast_bfloat16
from thrifty.planning.choice_explanations import ChoiceExplainer, ChoiceReason
from thrifty.planning.planner import allowed_options
from thrifty.planning.search_space import PlanOption, missing_requirements


def reasons(
    memory: float, allow: Numerics, base: tuple[Technique, ...] = (), evidence: Mapping[str, str] | None = None
) -> dict[str, ChoiceReason]:
    search = searching(memory, allow, base, time=by_expectation)
    _, barred = allowed_options(recipe(*base), plain_run(batch=BATCH), CATALOGUE, allow, "cpu")
    told = ChoiceExplainer(
        search, search.run(), barred, CATALOGUE, missing_requirements(CATALOGUE, "cpu"), allow, evidence or {}
    )
    return {reason.technique: reason for reason in told.all()}


@pytest.fixture(scope="module")
def exact() -> dict[str, ChoiceReason]:
    return reasons(700, Numerics.EXACT)


@pytest.fixture(scope="module")
def anything() -> dict[str, ChoiceReason]:
    return reasons(math.inf, Numerics.DIFFERENT)


def test_every_technique_has_a_verdict_and_a_reason(
    exact: dict[str, ChoiceReason], anything: dict[str, ChoiceReason]
) -> None:
    for told in (exact, anything):
        assert told.keys() == CATALOGUE.keys()
        assert all(reason.why for reason in told.values())
        assert {reason.verdict for reason in told.values()} <= {"kept", "added", "changed", "taken out", "not taken"}


def test_what_is_taken_says_what_it_does(exact: dict[str, ChoiceReason]) -> None:
    taken = [reason for reason in exact.values() if reason.verdict == "added"]
    assert taken and all("less at the peak" in reason.why for reason in taken)
    assert exact["optimizers.adamw"].verdict == "kept"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "precision.mixed",
            "changes the result, and you asked for exact" if has_fast_bfloat16() else "no units for bfloat16",
        ),
        ("optimizers.lion", "changes the result, and you asked for exact"),
        ("large_batch.gradient_accumulation", "rounds otherwise, and you asked for exact"),
        ("parallelism.tensor", "one rank: there is nothing to divide"),
        ("memory.offload_activations", "others are enough, and are expected to cost less time; by itself it takes"),
        ("memory.offload_optimizer", "by itself it takes 8% off the peak, to 870 MB, which is not enough"),
    ],
)
def test_what_is_not_taken_under_exact_says_why(exact: dict[str, ChoiceReason], name: str, why: str) -> None:
    assert exact[name].verdict == "not taken" and why in exact[name].why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("optimizers.lion", "refused: optimizers.adamw and optimizers.lion both decide the optimizer"),
        ("growth.layer_drop", "only a race can say"),
        ("memory.recompute", "not needed: everything fits without it"),
        ("precision.optimizer_state", "not needed: everything fits without it"),
        ("large_batch.gradient_cache", "refused: large_batch.gradient_cache"),
        ("measure.noise_scale", "it measures, and saves nothing"),
    ],
)
def test_what_is_not_taken_when_anything_may_change_says_why(
    anything: dict[str, ChoiceReason], name: str, why: str
) -> None:
    assert anything[name].verdict == "not taken" and why in anything[name].why


def test_what_saves_next_to_nothing_says_what_the_peak_is_made_of() -> None:
    def mostly_activations(run):  # type: ignore[no-untyped-def]
        return replace(formula(run), optimizer=1e6)

    search = searching(700, Numerics.ROUNDING, time=by_expectation, count=mostly_activations)
    told = ChoiceExplainer(search, search.run(), {}, CATALOGUE, {}, Numerics.ROUNDING, {})
    assert re.search(r"no gain here: .* activation memory is \d+%", told.of("precision.optimizer_state").why)


def test_what_was_measured_to_be_slower_says_so() -> None:
    def slower(candidate, bar):  # type: ignore[no-untyped-def]
        seconds = 1.0 + 0.25 * len(candidate.ways)
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,))

    search = searching(math.inf, Numerics.DIFFERENT, time=slower)
    told = ChoiceExplainer(search, search.run(), {}, CATALOGUE, {}, Numerics.DIFFERENT, {})
    tried = [
        name
        for name in ("precision.mixed", "compile", "precision.bfloat16_weights")
        if "measured no gain" in told.of(name).why
    ]
    assert tried


def test_that_others_cost_less_time_is_expected_or_measured_and_says_which() -> None:
    search = searching(500, Numerics.EXACT, time=by_expectation)
    told = ChoiceExplainer(search, search.run(), {}, CATALOGUE, {}, Numerics.EXACT, {})
    saving = {"memory.recompute", "memory.optimal_recompute", "memory.offload_activations"}
    names = saving - {technique.name for technique in told.chosen.techniques}
    found = {name: told.of(name).why for name in names}
    run = {t.name for candidate in search.tried for t in candidate.techniques}
    assert names & run and names - run
    assert all(("of the plan's time" in why) == (name in run) for name, why in found.items())


def test_what_is_taken_out_or_changed_is_told_apart() -> None:
    told = reasons(math.inf, Numerics.ROUNDING, (CATALOGUE["memory.recompute"](),))
    assert told["memory.recompute"].verdict == "taken out"
    changed = reasons(160, Numerics.ROUNDING, (CATALOGUE["large_batch.gradient_accumulation"](micro_batches=2),))
    assert changed["large_batch.gradient_accumulation"].verdict in ("changed", "kept")


def test_measured_evidence_is_told_beside_the_reason() -> None:
    told = reasons(700, Numerics.EXACT, evidence={"optimizers.lion": "no difference: results/lion/cpu.json"})
    assert told["optimizers.lion"].why.endswith("; measured: no difference: results/lion/cpu.json")


def test_adapters_are_offered_for_trained_models_alone() -> None:
    plain, own = plain_run(batch=BATCH), recipe(data=DataSettings(batch=BATCH))
    trained = replace(plain, is_trained=True)

    def labels(ways: dict[str, list[PlanOption]]) -> list[str]:
        return [way.label for some in ways.values() for way in some]

    assert "adapters.lora" not in labels(allowed_options(own, plain, CATALOGUE, Numerics.DIFFERENT, "cpu")[0])
    assert "adapters.lora" in labels(allowed_options(own, trained, CATALOGUE, Numerics.DIFFERENT, "cpu")[0])
