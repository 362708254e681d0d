"""Each technique of the catalog has the right reason in a plan."""

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
    _, disallowed = allowed_options(recipe(*base), plain_run(batch=BATCH), CATALOGUE, allow, "cpu")
    explainer = ChoiceExplainer(
        search, search.run(), disallowed, CATALOGUE, missing_requirements(CATALOGUE, "cpu"), allow, evidence or {}
    )
    return {reason.technique: reason for reason in explainer.all()}


@pytest.fixture(scope="module")
def exact() -> dict[str, ChoiceReason]:
    return reasons(700, Numerics.EXACT)


@pytest.fixture(scope="module")
def anything() -> dict[str, ChoiceReason]:
    return reasons(math.inf, Numerics.DIFFERENT)


def test_every_technique_has_a_verdict_and_a_reason(
    exact: dict[str, ChoiceReason], anything: dict[str, ChoiceReason]
) -> None:
    for explainer in (exact, anything):
        assert explainer.keys() == CATALOGUE.keys()
        assert all(reason.why for reason in explainer.values())
        assert {reason.verdict for reason in explainer.values()} <= {
            "kept",
            "added",
            "changed",
            "taken out",
            "not taken",
        }


def test_reasons_of_added_techniques(exact: dict[str, ChoiceReason]) -> None:
    taken = [reason for reason in exact.values() if reason.verdict == "added"]
    assert taken and all("reduces the tensors at the peak" in reason.why for reason in taken)
    assert exact["optimizers.adamw"].verdict == "kept"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "precision.mixed",
            "changes the result; the plan allows only exact changes" if has_fast_bfloat16() else "no bfloat16 units",
        ),
        ("optimizers.lion", "changes the result; the plan allows only exact changes"),
        ("large_batch.gradient_accumulation", "rounds differently; the plan allows only exact changes"),
        ("parallelism.tensor", "the plan has one rank"),
        ("memory.offload_activations", "other options suffice, and are expected to take less time; alone it saves"),
        ("memory.offload_optimizer", "alone it saves 8% of the tensors, to 870 MB, which is not enough"),
    ],
)
def test_reasons_against_techniques_under_exact(exact: dict[str, ChoiceReason], name: str, why: str) -> None:
    assert exact[name].verdict == "not taken" and why in exact[name].why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("optimizers.lion", "refused: optimizers.adamw and optimizers.lion both decide the optimizer"),
        ("growth.layer_drop", "only a comparison shows"),
        ("memory.recompute", "not needed: the run fits without it"),
        ("precision.optimizer_state", "not needed: the run fits without it"),
        ("large_batch.gradient_cache", "refused: large_batch.gradient_cache"),
        ("measure.noise_scale", "it measures training, but changes nothing"),
    ],
)
def test_reasons_against_techniques_under_different(anything: dict[str, ChoiceReason], name: str, why: str) -> None:
    assert anything[name].verdict == "not taken" and why in anything[name].why


def test_small_savings_report_the_largest_part_of_the_peak() -> None:
    def mostly_activations(run):  # type: ignore[no-untyped-def]
        return replace(formula(run), optimizer=1e6)

    search = searching(700, Numerics.ROUNDING, time=by_expectation, count=mostly_activations)
    explainer = ChoiceExplainer(search, search.run(), {}, CATALOGUE, {}, Numerics.ROUNDING, {})
    assert re.search(r"no gain: .* activation memory is \d+%", explainer.of("precision.optimizer_state").why)


def test_measured_slower_options_are_reported() -> None:
    def slower(candidate, bar):  # type: ignore[no-untyped-def]
        seconds = 1.0 + 0.25 * len(candidate.options)
        return replace(by_expectation(candidate), least=(seconds,), passes=(seconds,))

    search = searching(math.inf, Numerics.DIFFERENT, time=slower)
    explainer = ChoiceExplainer(search, search.run(), {}, CATALOGUE, {}, Numerics.DIFFERENT, {})
    tried = [
        name
        for name in ("precision.mixed", "compile", "precision.bfloat16_weights")
        if "no measured gain" in explainer.of(name).why
    ]
    assert tried


def test_expected_and_measured_times_are_distinguished() -> None:
    search = searching(500, Numerics.EXACT, time=by_expectation)
    explainer = ChoiceExplainer(search, search.run(), {}, CATALOGUE, {}, Numerics.EXACT, {})
    saving = {"memory.recompute", "memory.optimal_recompute", "memory.offload_activations"}
    names = saving - {technique.name for technique in explainer.chosen.techniques}
    result = {name: explainer.of(name).why for name in names}
    run = {t.name for candidate in search.tried for t in candidate.techniques}
    assert names & run and names - run
    assert all(("times the plan's time" in why) == (name in run) for name, why in result.items())


def test_removed_and_changed_techniques_are_distinguished() -> None:
    explainer = reasons(math.inf, Numerics.ROUNDING, (CATALOGUE["memory.recompute"](),))
    assert explainer["memory.recompute"].verdict == "taken out"
    changed = reasons(160, Numerics.ROUNDING, (CATALOGUE["large_batch.gradient_accumulation"](micro_batches=2),))
    assert changed["large_batch.gradient_accumulation"].verdict in ("changed", "kept")


def test_measured_evidence_follows_the_reason() -> None:
    explainer = reasons(700, Numerics.EXACT, evidence={"optimizers.lion": "no difference: results/lion/cpu.json"})
    assert explainer["optimizers.lion"].why.endswith("; measured: no difference: results/lion/cpu.json")


def test_adapters_are_options_for_pretrained_models_only() -> None:
    plain, own = plain_run(batch=BATCH), recipe(data=DataSettings(batch=BATCH))
    trained = replace(plain, is_trained=True)

    def labels(options: dict[str, list[PlanOption]]) -> list[str]:
        return [option.label for some in options.values() for option in some]

    assert "adapters.lora" not in labels(allowed_options(own, plain, CATALOGUE, Numerics.DIFFERENT, "cpu")[0])
    assert "adapters.lora" in labels(allowed_options(own, trained, CATALOGUE, Numerics.DIFFERENT, "cpu")[0])
