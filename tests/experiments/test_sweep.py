"""Search spaces, rungs and failures of a sweep. The runs are simulated: a launcher writes their summaries."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from thrifty.comparing.run_launchers import RunExit
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.user_objects import UserObjects
from thrifty.experiments.setting_ranges import SettingRange, read_space, sample_settings, with_settings
from thrifty.experiments.successive_halving import SweepSettings, run_sweep
from thrifty.interface.sweeps import SweepResult
from thrifty.recipes.vision_recipes import vit_digits

BASE = replace(vit_digits(), budget=Budget(steps=900))
RATES = {"adamw.lr": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]}


def rate_of(recipe: Recipe) -> float:
    return next(one.lr for one in recipe.techniques if one.name == "optimizers.adamw")  # type: ignore[attr-defined]


@dataclass
class Pretending:
    """Launcher whose runs end at once. Their loss is the distance of the learning rate from 0.4."""

    loss: Callable[[Recipe], float | None] = lambda recipe: abs(rate_of(recipe) - 0.4)
    metrics: dict[str, float | None] = field(default_factory=dict)
    fails: str = ""
    stops_at: int = 0
    """Number of the run that a signal stops, once; 0 for none."""
    started: list[tuple[str, float | None]] = field(default_factory=list)

    def __call__(self, recipe: Recipe, runs: Path) -> RunExit:
        self.started.append((recipe.name, recipe.checkpoints.pause_at))
        if len(self.started) == self.stops_at:
            return RunExit(143, "", 1.0, None)
        if recipe.name == self.fails:
            return RunExit(1, "the loss was not finite", 1.0, None)
        steps = round((recipe.checkpoints.pause_at or 1) * (recipe.budget.steps or 0))
        used = {"steps": steps, "tokens": 9 * steps, "seconds": 0.1 * steps}
        summary = {**used, "held_out_loss": self.loss(recipe), "held_out": self.metrics}
        (runs / recipe.name).mkdir(exist_ok=True)
        (runs / recipe.name / "summary.json").write_text(json.dumps(summary))
        return RunExit(0, "", 1.0, None)

    def stop(self) -> None:
        pass

    close = stop


def sweep(folder: Path, launcher: Pretending, over: Any = None, recipe: Recipe = BASE, **settings: Any) -> SweepResult:
    space = read_space(over or RATES, recipe)
    content = run_sweep(recipe, space, SweepSettings(**settings), folder, workers=[launcher])
    return SweepResult(content, UserObjects())


def test_each_rung_resumes_the_best_third(tmp_path: Path) -> None:
    launcher = Pretending()
    result = sweep(tmp_path / "sweep", launcher)
    rungs = [pause for _, pause in launcher.started]
    assert rungs == [1 / 9] * 9 + [1 / 3] * 3 + [None]
    assert {name for name, _ in launcher.started[9:12]} == {"trial-2", "trial-3", "trial-4"}
    assert result.best_settings == {"techniques.optimizers.adamw.lr": 0.4} and result.best.folder.name == "trial-3"
    assert "9 trials for the compute of 2.33 whole runs" in str(result)
    steps = [rung["steps"] for rung in result.trials[0]["rungs"]]
    assert steps == [100, 300, 900]


def test_one_rung_trains_all_trials_to_the_end(tmp_path: Path) -> None:
    launcher = Pretending()
    result = sweep(tmp_path / "sweep", launcher, rungs=1)
    assert [pause for _, pause in launcher.started] == [None] * 9
    assert result.best_settings == {"techniques.optimizers.adamw.lr": 0.4}


def test_an_interrupted_sweep_repeats_no_finished_rung(tmp_path: Path) -> None:
    stopped = Pretending(stops_at=11)
    first = sweep(tmp_path / "sweep", stopped)
    assert first.exit_code == 143 and "resumes it" in str(first)
    with pytest.raises(UsageError, match="is interrupted"):
        first.best  # noqa: B018
    again = Pretending()
    result = sweep(tmp_path / "sweep", again)
    assert [name for name, _ in again.started] == ["trial-3", "trial-4", "trial-3"] and result.exit_code == 0


def test_a_failed_trial_is_kept_and_takes_the_last_place(tmp_path: Path) -> None:
    result = sweep(tmp_path / "sweep", Pretending(fails="trial-3"))
    assert result.best_settings["techniques.optimizers.adamw.lr"] in (0.3, 0.5)
    assert result.trials[-1]["run"] == "trial-3" and "failed: the loss was not finite" in str(result)
    with pytest.raises(ThriftyError, match="no trial is left: its held-out loss is not finite"):
        sweep(tmp_path / "all", Pretending(loss=lambda recipe: None))


def test_a_sweep_whose_metric_is_never_finite_is_refused(tmp_path: Path) -> None:
    recipe = replace(BASE, evaluation=replace(BASE.evaluation, judge="accuracy"))
    with pytest.raises(ThriftyError, match="no trial is left: its held-out accuracy is not finite"):
        sweep(tmp_path / "sweep", Pretending(metrics={"accuracy": None}), recipe=recipe)


def test_another_definition_in_the_folder_is_refused(tmp_path: Path) -> None:
    sweep(tmp_path / "sweep", Pretending())
    with pytest.raises(UsageError, match=r"holds a different sweep: sweep\.reduction"):
        sweep(tmp_path / "sweep", Pretending(), reduction=2)


def test_metrics_of_which_more_is_better_are_maximized(tmp_path: Path) -> None:
    recipe = replace(BASE, evaluation=replace(BASE.evaluation, judge="loss", lower_is_better=False))
    result = sweep(tmp_path / "sweep", Pretending(), recipe=recipe)
    assert result.best_settings == {"techniques.optimizers.adamw.lr": pytest.approx(0.9)}
    assert "at the end of its values" in str(result)


def test_rows_and_chart_have_every_rung(tmp_path: Path) -> None:
    result = sweep(tmp_path / "sweep", Pretending(fails="trial-8"))
    assert len(result.rows()) == 13 and len(result.records()) == 13
    header, *rows = result.to_csv(tmp_path / "trials.csv").read_text().splitlines()
    assert header.startswith("trial,techniques.optimizers.adamw.lr,fraction,steps") and len(rows) == 13
    assert result.figure().save(tmp_path / "rungs.svg").read_text().startswith("<svg")
    with pytest.raises(UsageError, match="there is no chart 'rung'"):
        result.figure("rung")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({}, "no setting to vary"),
        ({"data.length": [8, 16]}, "is not comparable"),
        ({"budget.steps": [8, 16]}, "cannot differ between trials"),
        ({"lion.lr": [1e-4]}, "the recipe does not use 'optimizers.lion'"),
        ({"adamv.lr": [1e-4]}, "did you mean"),
        ({"adamw.rate": [1e-4, 1e-3]}, "rate"),
        ({"data.batch": "16..8"}, "is not a range"),
        ({"data.batch": "0..8:log"}, "is not a range"),
        ({"data.batch": "8,8"}, "list different values"),
        ({"data.batch": "8", "adamw.lr": [1e-3]}, "the sweep has one point"),
        ({"data.batch": [-1, 8]}, "batch is -1"),
    ],
)
def test_wrong_spaces_are_refused_before_the_first_run(tmp_path: Path, over: Any, message: str) -> None:
    launcher = Pretending()
    with pytest.raises(UsageError, match=message):
        run_sweep(BASE, read_space(over, BASE), SweepSettings(), tmp_path / "sweep", workers=[launcher])
    assert not launcher.started and not (tmp_path / "sweep").exists()


def test_all_trials_are_evaluated_in_one_batch(tmp_path: Path) -> None:
    batches: set[tuple[int, int]] = set()

    def observe(recipe: Recipe) -> float:
        batches.add((recipe.data.batch, recipe.evaluation.batch or recipe.data.batch))
        return 1.0

    sweep(tmp_path / "sweep", Pretending(loss=observe), {"data.batch": [16, 64]})
    assert batches == {(16, 64), (64, 64)}


def test_a_first_rung_before_the_first_step_is_infeasible(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match="before the first step"):
        sweep(tmp_path / "sweep", Pretending(), recipe=replace(BASE, budget=Budget(steps=4)))


def test_ranges_and_lists_are_covered_evenly() -> None:
    space = read_space({"adamw.lr": "1e-4..1e-2:log", "data.batch": "8,16", "model.depth": "1..4"}, BASE)
    assert space["model.depth"] == SettingRange(1, 4)
    points = sample_settings(space, 8, seed=3)
    assert points == sample_settings(space, 8, seed=3) != sample_settings(space, 8, seed=4)
    rates = sorted(point["techniques.optimizers.adamw.lr"] for point in points)
    assert sum(rate < 1e-3 for rate in rates) == 4 and 1e-4 <= rates[0] < rates[-1] <= 1e-2
    assert sorted(point["data.batch"] for point in points) == [8] * 4 + [16] * 4
    assert {type(point["model.depth"]) for point in points} == {int}
    assert with_settings(BASE, points[0]).model.depth == points[0]["model.depth"]


def test_lists_without_a_range_are_a_grid() -> None:
    space = read_space({"data.batch": "8,16", "adamw.lr": "1e-4,1e-3,1e-2"}, BASE)
    grid = sample_settings(space, None, seed=0)
    assert len(grid) == 6 and len({repr(point) for point in grid}) == 6
    few = sample_settings(space, 4, seed=0)
    assert len(few) == 4 and all(point in grid for point in few)
