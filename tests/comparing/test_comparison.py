"""Order, budgets and failures of a comparison's runs. The runs are simulated (see `simulated_runs`)."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_runs import Simulated, by_kind, variants

from thrifty.comparing.comparison import compare
from thrifty.comparing.comparison_protocol import ComparisonProtocol, claim_folder
from thrifty.comparing.equal_budgets import Equal, refuse_undecayed
from thrifty.comparing.loss_curves import seconds_to_loss, steps_to_loss
from thrifty.comparing.variants import Variant
from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.recipe import Budget, Recipe
from thrifty.interface.comparisons import ComparisonResult, open_comparison
from thrifty.reporting.comparison_charts import charts, found_difference
from thrifty.reporting.comparison_page import cautions

SHORT = ComparisonProtocol(seeds=7, trials=1)


def is_variant(recipe: Recipe) -> bool:
    return recipe.data.batch == 16


def rate_of(recipe: Recipe) -> float:
    return next(one.lr for one in recipe.techniques if one.name == "optimizers.adamw")  # type: ignore[attr-defined]


def distance_from_best_rate(recipe: Recipe) -> float:
    """Return the distance from the best learning rate. It is half the recipe's rate; for the variant twice."""
    return 100 * abs(rate_of(recipe) - (4e-3 if is_variant(recipe) else 1e-3))


@pytest.mark.parametrize(("effect", "word"), [(-0.2, "better"), (0.2, "worse"), (0.0, "no difference")])
def test_comparison_finds_the_simulated_effect(tmp_path: Path, effect: float, word: str) -> None:
    start = Simulated(effect=lambda recipe: effect * is_variant(recipe))
    result = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert (result["status"], result["exit_code"]) == ("finished", 0)
    assert result["outcome"]["variants"]["batch 16"]["verdict"]["verdict"] == word
    assert json.loads((tmp_path / "race" / "comparison.json").read_text())["outcome"] == result["outcome"]
    assert (tmp_path / "race" / "report.html").is_file()


def test_wrong_pilots_do_not_change_the_used_time(tmp_path: Path) -> None:
    """The variant's pilot is disturbed. All of its runs still train as long as the baseline's."""
    start = Simulated(step_time=lambda recipe: 0.03 if recipe.name == "variant-1-pilot-0" else 0.01)
    result = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert result["budgets"]["batch 16"]["steps"] == 33
    outcome = result["outcome"]["variants"]["batch 16"]
    assert outcome["used"] == 1 and outcome["steps"] == 100 and outcome["verdict"]["verdict"] == "no difference"
    assert all(entry["seconds"] == pytest.approx(1.0) for entry in by_kind(result, "seed"))


def test_unequal_time_is_part_of_the_verdict(tmp_path: Path) -> None:
    """The variant's runs train twice as long, because their steps become slower after the last estimate."""
    start = Simulated(slows=lambda recipe: 1.0 + is_variant(recipe))
    result = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert "used 2.00 times the budget" in result["outcome"]["variants"]["batch 16"]["verdict"]["sentence"]
    assert any("used 2.00 times the seconds of the baseline" in one for one in cautions(result))


@pytest.mark.parametrize(("equal", "pilots"), [("time", 2), ("flops", 0), ("tokens", 0), ("steps", 0)])
def test_only_equal_time_runs_pilots(equal: Equal, pilots: int, tmp_path: Path) -> None:
    start, pair = Simulated(), variants("batch 16: --set data.batch=16", steps=20)
    result = compare(pair, replace(SHORT, equal=equal, seeds=1), tmp_path / "race", workers=[start])
    assert len(by_kind(result, "pilot")) == pilots and len(start.started) == pilots + 2


def test_variants_take_turns_and_pairs_share_their_seed(tmp_path: Path) -> None:
    start = Simulated()
    result = compare(
        variants("batch 16: --set data.batch=16", "batch 8: --set data.batch=8"),
        replace(SHORT, seeds=4),
        tmp_path / "race",
        workers=[start],
    )
    order = [name.partition("-seed")[0] for name in start.started if "-seed-" in name]
    assert [order[place] for place in (0, 3, 6, 9)] == ["baseline", "variant-1", "variant-2", "baseline"]
    assert all(len({*order[place : place + 3]}) == 3 for place in (0, 3, 6, 9))
    assert [entry["seed"] for entry in by_kind(result, "seed")] == [seed for seed in range(4) for _ in range(3)]
    assert len(by_kind(result, "pilot")) == 3


@pytest.mark.parametrize(
    ("equal", "steps"), [("time", 50), ("flops", 400), ("tokens", 400), ("steps", 100)]
)  # a variant with a quarter of the batch, whose steps take twice as long
def test_steps_of_each_equal_budget(tmp_path: Path, equal: str, steps: int) -> None:
    start = Simulated(step_time=lambda recipe: 0.02 if is_variant(recipe) else 0.01)
    protocol = ComparisonProtocol(equal=equal, seeds=2, trials=1)  # type: ignore[arg-type]
    result = compare(variants("batch 16: --set data.batch=16"), protocol, tmp_path / "race", workers=[start])
    outcomes = result["outcome"]["variants"]
    assert (outcomes["baseline"]["steps"], outcomes["batch 16"]["steps"]) == (100, steps)
    assert outcomes["batch 16"]["used"] == pytest.approx(1, rel=0.02)
    assert outcomes["batch 16"]["ratios"]["step_time"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("budget", "steps"), [(Budget(steps=30), 30), (Budget(seconds=1.02), 100), (Budget(tokens=6400), 100)]
)
def test_baseline_budget_is_the_recipes(tmp_path: Path, budget: Budget, steps: int) -> None:
    pair = [
        replace(variant, recipe=replace(variant.recipe, budget=budget))
        for variant in variants("batch 16: --set data.batch=16")
    ]
    result = compare(pair, replace(SHORT, seeds=1), tmp_path / "race", workers=[Simulated()])
    assert result["budgets"]["baseline"]["steps"] == steps


def test_every_variant_runs_at_its_best_learning_rate(tmp_path: Path) -> None:
    start = Simulated(effect=distance_from_best_rate)
    result = compare(
        variants("batch 16: --set data.batch=16"), ComparisonProtocol(seeds=1), tmp_path / "race", workers=[start]
    )
    trials = by_kind(result, "trial")
    assert sorted((entry["variant"], entry["factor"]) for entry in trials) == [
        (label, factor) for label in ("baseline", "batch 16") for factor in (0.5, 1.0, 2.0)
    ]
    assert {label: (outcomes["lr"], outcomes["at_edge"]) for label, outcomes in result["rates"].items()} == {
        "baseline": (1e-3, True),
        "batch 16": (4e-3, True),
    }
    recipes = [(tmp_path / "race" / name) for name in ("baseline-seed-0", "variant-1-seed-0")]
    assert all(folder.is_dir() for folder in recipes)
    assert not any(entry["seed"] == 10_000 for entry in by_kind(result, "seed"))


def test_interrupted_comparison_resumes_with_equal_outcome(tmp_path: Path) -> None:
    whole = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "whole", workers=[Simulated()])
    start = Simulated(stops_at="variant-1-seed-2")
    first = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "cut", workers=[start])
    assert (first["status"], first["exit_code"]) == ("interrupted", 143)
    assert "outcome" not in first
    before = len(start.started)
    second = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "cut", workers=[start])
    assert start.started[before - 1] == start.started[before] == "variant-1-seed-2"
    assert len(start.started) == len({*start.started}) + 1
    assert second["outcome"] == whole["outcome"]


def test_runs_of_a_comparison_never_pause(tmp_path: Path) -> None:
    """A run that pauses is not at its end, so its loss would not be comparable."""
    pauses: list[float | None] = []

    def observe(recipe: Recipe) -> float:
        pauses.append(recipe.checkpoints.pause_at)
        return 0.0

    pair = []
    for variant in variants("batch 16: --set data.batch=16"):
        checkpoints = replace(variant.recipe.checkpoints, pause_at=0.5)
        pair.append(replace(variant, recipe=replace(variant.recipe, checkpoints=checkpoints)))
    result = compare(pair, replace(SHORT, seeds=1), tmp_path / "race", workers=[Simulated(effect=observe)])
    assert len(pauses) == len(result["runs"]) == 4 and set(pauses) == {None}


def test_all_variants_are_evaluated_in_the_baselines_batch(tmp_path: Path) -> None:
    """The held-out loss of a contrastive objective depends on the batch of its evaluations."""
    batches: dict[str, int] = {}

    def observe(recipe: Recipe) -> float:
        batches[recipe.name.partition("-seed")[0]] = recipe.evaluation.batch or recipe.data.batch
        return 0.0

    protocol = replace(SHORT, equal="steps", seeds=1)
    compare(variants("--set data.batch=16"), protocol, tmp_path / "race", workers=[Simulated(effect=observe)])
    assert batches == {"baseline": 64, "variant-1": 64}


def test_reordered_variants_keep_their_runs(tmp_path: Path) -> None:
    """Budgets and learning rates, which differ between variants, also stay."""
    texts = ("batch 16: --set data.batch=16", "batch 8: --set data.batch=8")
    start = Simulated(step_time=lambda recipe: 0.02 if is_variant(recipe) else 0.01, effect=distance_from_best_rate)
    protocol = ComparisonProtocol(seeds=3)
    whole = compare(variants(*texts), protocol, tmp_path / "whole", workers=[start])
    cut = replace(start, stops_at="variant-2-seed-1", started=[])
    compare(variants(*texts), protocol, tmp_path / "cut", workers=[cut])
    second = compare(variants(*reversed(texts)), protocol, tmp_path / "cut", workers=[cut])
    assert second["rates"] == whole["rates"] and second["budgets"] == whole["budgets"]
    assert second["outcome"] == whole["outcome"]


def test_failed_trial_is_not_repeated_after_seeds(tmp_path: Path) -> None:
    start = Simulated(fails={"variant-1-trial-2", "variant-1-seed-1"}, effect=distance_from_best_rate)
    first = compare(
        variants("batch 16: --set data.batch=16"), ComparisonProtocol(seeds=2), tmp_path / "race", workers=[start]
    )
    start.fails, start.started = (), []
    again = compare(
        variants("batch 16: --set data.batch=16"),
        ComparisonProtocol(seeds=2),
        tmp_path / "race",
        workers=[start],
        retry=True,
    )
    assert start.started == ["variant-1-seed-1"] and again["rates"] == first["rates"]


def test_finished_comparison_runs_nothing_again(tmp_path: Path) -> None:
    first = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[Simulated()])
    start = Simulated()
    assert (
        compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])["outcome"]
        == first["outcome"]
    )
    assert start.started == []


def test_folder_of_another_comparison_is_refused(tmp_path: Path) -> None:
    compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[Simulated()])
    with pytest.raises(UsageError, match=r"(?s)protocol\.seeds: 7 → 9.*false findings"):
        compare(
            variants("batch 16: --set data.batch=16"), replace(SHORT, seeds=9), tmp_path / "race", workers=[Simulated()]
        )
    with pytest.raises(UsageError, match=r"variants\.batch 16: present → absent"):
        compare(variants("batch 8: --set data.batch=8"), SHORT, tmp_path / "race", workers=[Simulated()])


def test_failed_runs_are_listed_and_prevent_a_verdict(tmp_path: Path) -> None:
    start = Simulated(fails={"variant-1-seed-3"}, effect=lambda recipe: -0.5 * is_variant(recipe))
    result = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    outcome = result["outcome"]["variants"]["batch 16"]
    assert outcome["failed"] == 1 and outcome["verdict"]["verdict"] == "undecided"
    (failed,) = [entry for entry in result["runs"] if entry["status"] == "failed"]
    assert failed["run"] == "variant-1-seed-3" and failed["error"] == "the loss was not finite"
    page = (tmp_path / "race" / "report.html").read_text()
    assert "the loss was not finite" in page and "1 of them failed" in page
    start.fails, start.started = (), []
    assert (
        compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])["outcome"]
        == result["outcome"]
    )
    again = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start], retry=True)
    assert start.started == ["variant-1-seed-3"]
    assert again["outcome"]["variants"]["batch 16"]["verdict"]["verdict"] == "better"


def test_variant_that_always_fails_is_reported(tmp_path: Path) -> None:
    start = Simulated(fails={f"variant-1-seed-{seed}" for seed in range(7)})
    result = compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert result["outcome"]["variants"]["batch 16"]["verdict"]["sentence"] == "undecided: all 7 pairs failed"
    assert "7 of them failed" in (tmp_path / "race" / "report.html").read_text()


def test_variants_with_other_held_out_data_are_refused(tmp_path: Path) -> None:
    start = Simulated(label_entropy=lambda recipe: 1.0 + is_variant(recipe))
    with pytest.raises(UsageError, match=r"not comparable with the baseline: label_entropy: 1\.0 → 2\.0"):
        compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])


FAILURES = {
    "variant-1-count": ("batch 16 fails before its first step: the model has no blocks", []),
    "variant-1-pilot-0": (
        "batch 16 fails in its pilot of 24 steps: out of memory",
        ["baseline-pilot-0", "variant-1-pilot-0"],
    ),
}


@pytest.mark.parametrize("run", FAILURES)
def test_failing_variant_stops_the_comparison(run: str, tmp_path: Path) -> None:
    start, (words, started) = Simulated(breaks={run}), FAILURES[run]
    with pytest.raises(UsageError, match=words):
        compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])
    assert start.started == started
    assert json.loads((tmp_path / "race" / "comparison.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize(("trials", "run"), [(1, "variant-1-seed-0"), (3, "variant-1-trial-0")])
def test_early_failure_of_a_first_run_stops_all(trials: int, run: str, tmp_path: Path) -> None:
    protocol, pair = replace(SHORT, equal="steps", trials=trials), variants("batch 16: --set data.batch=16")
    start = Simulated(breaks={run})
    for _ in range(2):  # the second call does not run anything again
        with pytest.raises(
            UsageError, match="batch 16 fails within the first 24 steps of its first run: out of memory"
        ):
            compare(pair, protocol, tmp_path / "race", workers=[start])
        assert start.started == [run.replace("variant-1", "baseline"), run]
    start.breaks = ()
    assert compare(pair, protocol, tmp_path / "race", workers=[start], retry=True)["status"] == "finished"


@pytest.mark.parametrize("change", ["--without schedules.cosine", "--set techniques.schedules.cosine.floor=0.6"])
def test_undecayed_learning_rate_is_refused_before_any_run(change: str, tmp_path: Path) -> None:
    start = Simulated()
    with pytest.raises(UsageError, match=r"constant: its learning rate ends at '(60|61|100)%' of its peak") as error:
        compare(variants(f"constant: {change}"), SHORT, tmp_path / "race", workers=[start])
    assert not start.started and not (tmp_path / "race").exists()
    assert 'techniques=[…, "schedules.linear"]' in str(error.value)


@pytest.mark.parametrize("name", ["losses.z_loss", "data_selection.gradient_norm_sampling"])
def test_learning_rate_check_needs_no_objective(name: str, tmp_path: Path) -> None:
    result = compare(variants(f"other: --with {name}"), SHORT, tmp_path, workers=[Simulated()])
    assert result["status"] == "finished"


def test_learning_rates_of_a_long_run_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    checked_steps: list[int] = []

    def scalars(transform: GradientTransform, step: int, update: int) -> Mapping[str, float]:
        checked_steps.append(step)
        return counted(transform, step, update)

    counted = GradientTransform.scalars
    monkeypatch.setattr(GradientTransform, "scalars", scalars)
    pair = variants("batch 16: --set data.batch=16", steps=1_000_000)
    refuse_undecayed(pair, {variant.label: 1_000_000 for variant in pair})
    assert len(checked_steps) < 10_000 and checked_steps[0] == 0 and checked_steps[-1] == 999_999


def test_name_is_free_again_if_only_pilots_ran(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fails in its pilot"):
        compare(
            variants("batch 16: --set data.batch=16"),
            SHORT,
            tmp_path,
            workers=[Simulated(breaks=["variant-1-pilot-0"])],
        )
    other = variants("batch 8: --set data.batch=8")
    result = compare(other, SHORT, tmp_path, workers=[Simulated()])
    assert result["status"] == "finished" and "batch 8" in result["budgets"] and len(by_kind(result, "pilot")) == 2
    with pytest.raises(UsageError, match="holds a different comparison"):
        compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path, workers=[Simulated()])


def test_equal_flops_refuse_variants_with_changing_flops(tmp_path: Path) -> None:
    pair, start = variants("batch 16: --set data.batch=16"), Simulated(varies=is_variant)
    with pytest.raises(UsageError, match="batch 16: its FLOPs change over the run"):
        compare(pair, replace(SHORT, equal="flops"), tmp_path / "flops", workers=[start])
    assert not start.started
    result = compare(pair, SHORT, tmp_path / "time", workers=[start])
    assert any("the FLOPs of batch 16 change over its run" in one for one in cautions(result))


def test_budget_below_one_step_is_infeasible(tmp_path: Path) -> None:
    start = Simulated(step_time=lambda recipe: 200.0 if is_variant(recipe) else 1.0)
    with pytest.raises(InfeasibleError, match="batch 16: a step costs more than the whole budget"):
        compare(variants("batch 16: --set data.batch=16"), SHORT, tmp_path / "race", workers=[start])


def test_comparison_of_an_earlier_version_keeps_its_steps(tmp_path: Path) -> None:
    """Earlier versions planned a number of steps for equal time."""
    start, pair = Simulated(stops_at="variant-1-seed-2"), variants("batch 16: --set data.batch=16")
    compare(pair, SHORT, tmp_path / "race", workers=[start])
    file = tmp_path / "race" / "comparison.json"
    data = json.loads(file.read_text())
    for planned in data["budgets"].values():
        del planned["budget"]
        planned["steps"] = 70
    file.write_text(json.dumps(data))
    result = compare(pair, SHORT, tmp_path / "race", workers=[start])
    assert [entry["steps"] for entry in by_kind(result, "seed")] == [100] * 5 + [70] * 9


def test_trials_require_a_learning_rate(tmp_path: Path) -> None:
    pair = variants("--without optimizers.adamw")
    with pytest.raises(UsageError, match="no learning rate"):
        compare(pair, ComparisonProtocol(), tmp_path / "race", workers=[Simulated()])


def test_time_to_a_loss_is_interpolated() -> None:
    curve = [[1, 1.0, 4.0], [2, 2.0, None], [3, 3.0, 2.0], [4, 4.0, 1.0]]
    assert seconds_to_loss(curve, 3.0) == 2.0 and steps_to_loss([[10, 1.0, 4.0], [30, 9.0, 2.0]], 3.0) == 20.0
    assert seconds_to_loss(curve, 5.0) == 1.0
    assert seconds_to_loss(curve, 1.0) == 4.0
    assert seconds_to_loss(curve, 0.5) is None


def test_judged_metric_is_shown_in_tables_and_charts(tmp_path: Path) -> None:
    def judged(variant: Variant) -> Variant:
        settings = replace(variant.recipe.evaluation, judge="accuracy")
        return replace(variant, recipe=replace(variant.recipe, evaluation=settings))

    pair = [judged(variant) for variant in variants("batch 16: --set data.batch=16")]
    start = Simulated(effect=lambda recipe: -0.2 * is_variant(recipe), spread=0.001)  # a lower loss, a higher accuracy
    content = compare(pair, replace(SHORT, trials=2), tmp_path / "race", workers=[start])
    result = ComparisonResult(content)
    assert result.verdicts == {"batch 16": "better"} and "compared by held-out accuracy" in repr(result)
    head, baseline, variant = str(result.table()).strip().splitlines()[-3:]
    assert "held-out accuracy" in head and re.search(r"\+0\.0[34]\d* \(\+0\.0[34]\d* to \+0\.0[34]\d*\)", variant), (
        head,
        baseline,
    )
    (curves, _, drawn), (differences, caption, _) = charts(content)
    assert differences == "Differences" and "Right of the line, a variant is better" in caption
    assert curves == "Held-out accuracy over time" and '"loss": 1.0' in drawn.to_json(indent=None)
    low, high = (found_difference(content, "batch 16")[end] for end in ("low", "high"))  # type: ignore[index]
    assert 0 < low < high  # type: ignore[operator]
    page = (tmp_path / "race" / "report.html").read_text()
    assert "held-out accuracy minus baseline" in page and "The verdict is based on accuracy only" in page


def test_interval_has_the_confidence_of_several_variants(tmp_path: Path) -> None:
    texts = ("batch 16: --set data.batch=16", "batch 8: --set data.batch=8")
    for some, words in ((texts[:1], "(95 %)"), (texts, "(97.5 %)")):
        content = compare(variants(*some), SHORT, tmp_path / str(len(some)), workers=[Simulated()])
        assert f"minus baseline {words}" in ComparisonResult(content).table().head
        assert words in charts(content)[-1][1]


def test_a_comparison_without_runs_has_a_page(tmp_path: Path) -> None:
    with claim_folder(tmp_path / "race", variants("batch 16: --set data.batch=16"), SHORT):
        result = open_comparison(tmp_path / "race")
    assert (result.content["status"], result.exit_code) == ("running", 0)
    assert "A baseline and one variant" in repr(result) and "A baseline and one variant" in result.page.read_text()
