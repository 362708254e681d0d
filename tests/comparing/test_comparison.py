"""The course of a race: what is run in which order, at which budget, and what happens when something goes wrong. Its
runs pretend (see `simulated_runs`)."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_runs import Simulated, arms, by_kind

from thrifty.comparing.comparison import MOST_PILOTS, TIMED_PILOTS, compare
from thrifty.comparing.comparison_protocol import ComparisonProtocol
from thrifty.comparing.comparison_summary import seconds_to_loss
from thrifty.comparing.equal_budgets import StepCost, refuse_undecayed, steady, steps_of_variants
from thrifty.comparing.variants import Variant
from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.recipe import Budget, Recipe
from thrifty.interface.comparisons import ComparisonResult
from thrifty.reporting.comparison_charts import charts, found_difference

SHORT = ComparisonProtocol(seeds=7, trials=1)


def is_arm(recipe: Recipe) -> bool:
    return recipe.data.batch == 16


def rate_of(recipe: Recipe) -> float:
    return next(one.lr for one in recipe.techniques if one.name == "optimizers.adamw")  # type: ignore[attr-defined]


def off_its_best_rate(recipe: Recipe) -> float:
    """Lowest at half the recipe's rate, for the arm at twice."""
    return 100 * abs(rate_of(recipe) - (4e-3 if is_arm(recipe) else 1e-3))


@pytest.mark.parametrize(("effect", "word"), [(-0.2, "better"), (0.2, "worse"), (0.0, "no difference")])
def test_a_race_ends_with_the_verdict_that_was_planted(tmp_path: Path, effect: float, word: str) -> None:
    start = Simulated(effect=lambda recipe: effect * is_arm(recipe))
    result = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert (result["status"], result["exit_code"]) == ("finished", 0)
    assert result["outcome"]["arms"]["batch 16"]["verdict"]["verdict"] == word
    assert json.loads((tmp_path / "race" / "comparison.json").read_text())["outcome"] == result["outcome"]
    assert (tmp_path / "race" / "report.html").is_file()


def test_pilots_in_a_slow_moment_make_no_finding(tmp_path: Path) -> None:
    """Twice the steps and so a lower loss, of an arm whose steps take as long as the baseline's."""
    start = Simulated(
        step_time=lambda recipe: 0.02 if recipe.name.startswith("baseline-pilot") else 0.01,
        effect=lambda recipe: -0.2 * is_arm(recipe),
    )
    result = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    verdict = result["outcome"]["arms"]["batch 16"]["verdict"]
    assert verdict["verdict"] == "undecided" and "it used 2.00 times as much" in verdict["sentence"]


def test_two_equal_variants_with_a_pilot_that_is_2_percent_off_are_not_worse(tmp_path: Path) -> None:
    """All pairs make 2 % fewer steps of a loss that falls with the logarithm of its steps."""
    start = Simulated(
        step_time=lambda recipe: 0.0102 if recipe.name.startswith("arm-1-pilot") else 0.01,
        effect=lambda recipe: -0.5 * math.log((recipe.budget.steps or 0) / 1000) * ("seed" in recipe.name),
        spread=0.0005,
    )
    result = compare(arms("batch 16: --set data.batch=16", steps=1000), SHORT, tmp_path / "race", workers=[start])
    arm = result["outcome"]["arms"]["batch 16"]
    assert arm["used"] == pytest.approx(0.98, abs=0.002)
    assert arm["verdict"]["verdict"] == "no difference" and arm["verdict"]["found"]["low"] < 0
    assert "because budgets differed" in arm["verdict"]["sentence"]


def test_seeds_are_not_started_while_pilots_disagree(tmp_path: Path) -> None:
    def unsteady(recipe: Recipe) -> float:
        return 0.01 * (1 + 0.1 * (int(recipe.name[-1]) % 2)) if "arm-1-pilot" in recipe.name else 0.01

    start = Simulated(step_time=unsteady)
    pair = arms("batch 16: --set data.batch=16")
    with pytest.raises(InfeasibleError, match=r"batch 16: a step took .* in two pilots"):
        compare(pair, SHORT, tmp_path / "race", workers=[start])
    assert len(start.started) == 2 * MOST_PILOTS and not any("seed" in name for name in start.started)
    flops = replace(SHORT, equal="flops")
    assert compare(pair, flops, tmp_path / "flops", workers=[start])["status"] == "finished"


def test_pilots_that_agree_in_the_end_are_the_ones_that_count(tmp_path: Path) -> None:
    start = Simulated(step_time=lambda recipe: 0.012 if recipe.name == "arm-1-pilot-1" else 0.01)
    result = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert len(by_kind(result, "pilot")) == 2 * (TIMED_PILOTS + 2)
    assert result["budgets"]["batch 16"]["steps"] == 100


def test_arms_take_turns_and_pairs_share_their_seed(tmp_path: Path) -> None:
    start = Simulated()
    result = compare(
        arms("batch 16: --set data.batch=16", "batch 8: --set data.batch=8"),
        replace(SHORT, seeds=4),
        tmp_path / "race",
        workers=[start],
    )
    order = [name.partition("-seed")[0] for name in start.started if "-seed-" in name]
    assert [order[place] for place in (0, 3, 6, 9)] == ["baseline", "arm-1", "arm-2", "baseline"]
    assert all(len({*order[place : place + 3]}) == 3 for place in (0, 3, 6, 9))
    assert [entry["seed"] for entry in by_kind(result, "seed")] == [seed for seed in range(4) for _ in range(3)]
    assert len(by_kind(result, "pilot")) == 3 * (TIMED_PILOTS + 1)


@pytest.mark.parametrize(
    ("equal", "steps"), [("time", 50), ("flops", 400), ("tokens", 400), ("steps", 100)]
)  # an arm of a fourth of the batch whose steps take twice as long
def test_each_arm_makes_the_steps_that_its_budget_pays_for(tmp_path: Path, equal: str, steps: int) -> None:
    start = Simulated(step_time=lambda recipe: 0.02 if is_arm(recipe) else 0.01)
    terms = ComparisonProtocol(equal=equal, seeds=2, trials=1)  # type: ignore[arg-type]
    result = compare(arms("batch 16: --set data.batch=16"), terms, tmp_path / "race", workers=[start])
    found = result["outcome"]["arms"]
    assert (found["baseline"]["steps"], found["batch 16"]["steps"]) == (100, steps)
    assert found["batch 16"]["used"] == pytest.approx(1, rel=0.02)
    assert found["batch 16"]["ratios"]["step_time"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("budget", "steps"), [(Budget(steps=30), 30), (Budget(seconds=1.005), 100), (Budget(tokens=6400), 100)]
)
def test_the_budget_of_the_baseline_is_the_recipes(tmp_path: Path, budget: Budget, steps: int) -> None:
    pair = [replace(arm, recipe=replace(arm.recipe, budget=budget)) for arm in arms("batch 16: --set data.batch=16")]
    result = compare(pair, replace(SHORT, seeds=1), tmp_path / "race", workers=[Simulated()])
    assert result["budgets"]["baseline"]["steps"] == steps


def test_every_arm_is_tried_at_as_many_rates_and_runs_at_its_best(tmp_path: Path) -> None:
    start = Simulated(effect=off_its_best_rate)
    result = compare(
        arms("batch 16: --set data.batch=16"), ComparisonProtocol(seeds=1), tmp_path / "race", workers=[start]
    )
    trials = by_kind(result, "trial")
    assert sorted((entry["arm"], entry["factor"]) for entry in trials) == [
        (label, factor) for label in ("baseline", "batch 16") for factor in (0.5, 1.0, 2.0)
    ]
    assert {label: (found["lr"], found["at_edge"]) for label, found in result["rates"].items()} == {
        "baseline": (1e-3, True),
        "batch 16": (4e-3, True),
    }
    recipes = [(tmp_path / "race" / name) for name in ("baseline-seed-0", "arm-1-seed-0")]
    assert all(folder.is_dir() for folder in recipes)
    assert not any(entry["seed"] == 10_000 for entry in by_kind(result, "seed"))


def test_an_interrupted_race_goes_on_where_it_was_and_comes_to_the_same(tmp_path: Path) -> None:
    whole = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "whole", workers=[Simulated()])
    start = Simulated(stops_at="arm-1-seed-2")
    first = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "cut", workers=[start])
    assert (first["status"], first["exit_code"]) == ("interrupted", 143)
    assert "outcome" not in first
    before = len(start.started)
    second = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "cut", workers=[start])
    assert start.started[before - 1] == start.started[before] == "arm-1-seed-2"
    assert len(start.started) == len({*start.started}) + 1
    assert second["outcome"] == whole["outcome"]


def test_arms_in_another_order_keep_their_runs(tmp_path: Path) -> None:
    """Their budgets and rates as well, which differ from one another's."""
    texts = ("batch 16: --set data.batch=16", "batch 8: --set data.batch=8")
    start = Simulated(step_time=lambda recipe: 0.02 if is_arm(recipe) else 0.01, effect=off_its_best_rate)
    terms = ComparisonProtocol(seeds=3)
    whole = compare(arms(*texts), terms, tmp_path / "whole", workers=[start])
    cut = replace(start, stops_at="arm-2-seed-1", started=[])
    compare(arms(*texts), terms, tmp_path / "cut", workers=[cut])
    second = compare(arms(*reversed(texts)), terms, tmp_path / "cut", workers=[cut])
    assert second["rates"] == whole["rates"] and second["budgets"] == whole["budgets"]
    assert second["outcome"] == whole["outcome"]


def test_a_trial_that_failed_is_not_tried_again_once_its_arm_runs_at_the_rate_of_another(tmp_path: Path) -> None:
    start = Simulated(fails={"arm-1-trial-2", "arm-1-seed-1"}, effect=off_its_best_rate)
    first = compare(
        arms("batch 16: --set data.batch=16"), ComparisonProtocol(seeds=2), tmp_path / "race", workers=[start]
    )
    start.fails, start.started = (), []
    again = compare(
        arms("batch 16: --set data.batch=16"),
        ComparisonProtocol(seeds=2),
        tmp_path / "race",
        workers=[start],
        retry=True,
    )
    assert start.started == ["arm-1-seed-1"] and again["rates"] == first["rates"]


def test_a_race_that_is_finished_runs_nothing_again(tmp_path: Path) -> None:
    first = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[Simulated()])
    start = Simulated()
    assert (
        compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])["outcome"]
        == first["outcome"]
    )
    assert start.started == []


def test_another_race_in_the_same_folder_is_refused_with_what_differs(tmp_path: Path) -> None:
    compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[Simulated()])
    with pytest.raises(UsageError, match=r"(?s)terms\.seeds: 7 → 9.*chance"):
        compare(
            arms("batch 16: --set data.batch=16"), replace(SHORT, seeds=9), tmp_path / "race", workers=[Simulated()]
        )
    with pytest.raises(UsageError, match=r"arms\.batch 16: present → absent"):
        compare(arms("batch 8: --set data.batch=8"), SHORT, tmp_path / "race", workers=[Simulated()])


def test_failures_are_listed_and_leave_the_arm_without_a_verdict(tmp_path: Path) -> None:
    start = Simulated(fails={"arm-1-seed-3"}, effect=lambda recipe: -0.5 * is_arm(recipe))
    result = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    arm = result["outcome"]["arms"]["batch 16"]
    assert arm["failed"] == 1 and arm["verdict"]["verdict"] == "undecided"
    (failed,) = [entry for entry in result["runs"] if entry["status"] == "failed"]
    assert failed["run"] == "arm-1-seed-3" and failed["error"] == "the loss was not finite"
    page = (tmp_path / "race" / "report.html").read_text()
    assert "the loss was not finite" in page and "1 of them failed" in page
    start.fails, start.started = (), []
    assert (
        compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])["outcome"]
        == result["outcome"]
    )
    again = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start], retry=True)
    assert start.started == ["arm-1-seed-3"]
    assert again["outcome"]["arms"]["batch 16"]["verdict"]["verdict"] == "better"


def test_an_arm_that_fails_everywhere_is_shown_as_that(tmp_path: Path) -> None:
    start = Simulated(fails={f"arm-1-seed-{seed}" for seed in range(7)})
    result = compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert result["outcome"]["arms"]["batch 16"]["verdict"]["sentence"] == "undecided: all 7 pairs failed"
    assert "7 of them failed" in (tmp_path / "race" / "report.html").read_text()


def test_arms_whose_held_out_data_turn_out_to_differ_are_refused(tmp_path: Path) -> None:
    start = Simulated(label_entropy=lambda recipe: 1.0 + is_arm(recipe))
    with pytest.raises(UsageError, match=r"judged on something else than the baseline: label_entropy: 1\.0 → 2\.0"):
        compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])


def test_an_arm_that_fails_in_its_pilot_costs_no_more_than_that(tmp_path: Path) -> None:
    start = Simulated(fails={"arm-1-pilot-0"})
    with pytest.raises(UsageError, match="batch 16 fails in its pilot"):
        compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert start.started == ["baseline-pilot-0", "arm-1-pilot-0"]
    assert json.loads((tmp_path / "race" / "comparison.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize("change", ["--without schedules.cosine", "--set techniques.schedules.cosine.floor=0.6"])
def test_a_rate_that_is_not_decayed_is_refused_before_anything_runs(change: str, tmp_path: Path) -> None:
    start = Simulated()
    with pytest.raises(UsageError, match=r"constant: its learning rate ends at (60|61|100)% of the largest") as error:
        compare(arms(f"constant: {change}"), SHORT, tmp_path / "race", workers=[start])
    assert not start.started and not (tmp_path / "race").exists()
    assert 'techniques=[…, "schedules.linear"]' in str(error.value)


@pytest.mark.parametrize("name", ["losses.z_loss", "data_selection.gradient_norm_sampling"])
def test_a_rate_is_checked_without_the_objective_that_a_technique_needs(name: str, tmp_path: Path) -> None:
    result = compare(arms(f"other: --with {name}"), SHORT, tmp_path, workers=[Simulated()])
    assert result["status"] == "finished"


def test_rates_of_a_long_run_are_looked_at_in_some_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    def scalars(transform: GradientTransform, step: int, update: int) -> Mapping[str, float]:
        looked_at.append(step)
        return counted(transform, step, update)

    counted = GradientTransform.scalars
    monkeypatch.setattr(GradientTransform, "scalars", scalars)
    refuse_undecayed(arms("batch 16: --set data.batch=16", steps=1_000_000), 1_000_000)
    assert len(looked_at) < 10_000 and looked_at[0] == 0 and looked_at[-1] == 999_999


def test_pilots_that_would_be_the_same_are_run_once(tmp_path: Path) -> None:
    pair = arms("batch 16: --set data.batch=16", steps=20)  # fewer than a pilot has
    assert len(by_kind(compare(pair, SHORT, tmp_path / "time", workers=[Simulated()]), "pilot")) == 2 * TIMED_PILOTS
    steps = replace(SHORT, equal="steps")
    assert len(by_kind(compare(pair, steps, tmp_path / "steps", workers=[Simulated()]), "pilot")) == 2


def test_a_name_is_free_again_where_nothing_but_pilots_was_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fails in its pilot"):
        compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path, workers=[Simulated(fails=["arm-1-pilot-0"])])
    other = arms("batch 8: --set data.batch=8")
    result = compare(other, SHORT, tmp_path, workers=[Simulated()])
    assert result["status"] == "finished" and "batch 8" in result["budgets"] and len(by_kind(result, "pilot")) == 6
    with pytest.raises(UsageError, match="is another comparison"):
        compare(arms("batch 16: --set data.batch=16"), SHORT, tmp_path, workers=[Simulated()])


def cost(**changed: float) -> StepCost:
    return replace(StepCost(1.0, 1.0, 1.0, False), **changed)


def test_flops_that_change_over_the_run_are_not_made_equal() -> None:
    pair: tuple[Variant, ...] = arms("batch 16: --set data.batch=16")
    costs = {"baseline": cost(), "batch 16": cost(flops_vary=True)}
    with pytest.raises(UsageError, match="its FLOPs change over the run"):
        steps_of_variants(pair, costs, "flops")
    assert steps_of_variants(pair, costs, "time")["batch 16"] == 100


def test_a_budget_that_pays_for_no_step_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="costs more than the whole budget"):
        steps_of_variants(
            arms("batch 16: --set data.batch=16"), {"baseline": cost(), "batch 16": cost(seconds=200.0)}, "time"
        )


def test_trials_need_a_rate_to_try(tmp_path: Path) -> None:
    pair = arms("--without optimizers.adamw")
    with pytest.raises(UsageError, match="no learning rate"):
        compare(pair, ComparisonProtocol(), tmp_path / "race", workers=[Simulated()])


def test_what_happens_once_is_no_step_time() -> None:
    assert steady([30.0, 1.0, 1.0, 1.0, 9.0, 1.0, 1.0])[1:] == [1.0] * 6
    assert steady([1.0] * 4 + [2.0] * 4) == [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize("every", [3, 4, 10])
def test_what_happens_every_few_steps_is_part_of_them(every: int) -> None:
    """Such as a preconditioner every tenth: arms that pay for it would have it for nothing at equal time."""
    seconds = [6.0 if step % every == 0 else 1.0 for step in range(1, 61)]
    assert steady([30.0, *seconds])[1:] == seconds


def test_the_time_to_a_loss_lies_between_evaluations() -> None:
    curve = [[1, 1.0, 4.0], [2, 2.0, None], [3, 3.0, 2.0], [4, 4.0, 1.0]]
    assert seconds_to_loss(curve, 3.0) == 2.0
    assert seconds_to_loss(curve, 5.0) == 1.0
    assert seconds_to_loss(curve, 1.0) == 4.0
    assert seconds_to_loss(curve, 0.5) is None


def test_a_metric_that_is_judged_is_what_tables_and_charts_show(tmp_path: Path) -> None:
    def judged(variant: Variant) -> Variant:
        settings = replace(variant.recipe.evaluation, judge="accuracy")
        return replace(variant, recipe=replace(variant.recipe, evaluation=settings))

    pair = [judged(variant) for variant in arms("batch 16: --set data.batch=16")]
    start = Simulated(effect=lambda recipe: -0.2 * is_arm(recipe), spread=0.001)  # a lower loss, a higher accuracy
    content = compare(pair, replace(SHORT, trials=2), tmp_path / "race", workers=[start])
    result = ComparisonResult(content)
    assert result.verdicts == {"batch 16": "better"} and "compared by held-out accuracy" in repr(result)
    head, baseline, variant = str(result.table()).strip().splitlines()[-3:]
    assert "held-out accuracy" in str(result.table()) and "+0.0397" in variant, (head, baseline)
    (differences, caption, _), (curves, _, drawn) = charts(content)
    assert differences == "Differences" and "Right of the line, a variant is better" in caption
    assert curves == "Held-out accuracy over time" and '"loss": 1.0' in drawn.to_json(indent=None)
    low, high = (found_difference(content, "batch 16")[end] for end in ("low", "high"))  # type: ignore[index]
    assert 0 < low < high  # type: ignore[operator]
    page = (tmp_path / "race" / "report.html").read_text()
    assert "held-out accuracy minus baseline" in page and "The verdict is based on accuracy only" in page
