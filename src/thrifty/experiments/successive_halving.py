"""Sweep over settings of a recipe by successive halving.

Source    Jamieson & Talwalkar 2016, Non-stochastic Best Arm Identification and Hyperparameter Optimization (AISTATS);
          Li et al. 2018, Hyperband (JMLR 18:185), and 2020, A System for Massively Parallel Hyperparameter Tuning
          (MLSys), whose ASHA promotes without waiting for a rung. Here every rung ends before the next one starts.

All trials train to the first rung, a fraction of the budget. The best 1/`reduction` of them resume to the next rung,
and so on; the last rung is the whole budget. Each trial is a run with the whole budget, which pauses at its rungs. Its
schedules are therefore the schedules of the whole run. The best trial is bit-identical to `thrifty train` with its
settings, unless the budget is in seconds.

    sweep.json                   definition, and each trial with its settings and the measurement of each rung
    trial-0, trial-1, …          run folders
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from thrifty.comparing.comparison_workers import run_on_workers
from thrifty.comparing.run_launchers import RunLauncher, RunStopped, closing_workers
from thrifty.comparing.variants import Variant, check_alike, evaluated_like
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError
from thrifty.core.plain_values import differences
from thrifty.core.recipe import Recipe
from thrifty.core.secret_redaction import redact
from thrifty.core.setting_bounds import SettingBound, check_bounds
from thrifty.experiments.setting_ranges import Settings, Space, sample_settings, with_settings
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.reporting.number_format import duration, significant
from thrifty.training.input_identity import input_identity, refuse_changed_inputs
from thrifty.training.judged_measure import worth
from thrifty.training.run_folder import RunFolder

FILE = "sweep.json"
FIXED = ("budget", "evaluation", "checkpoints", "name", "seed")
"""Recipe sections that are equal for all trials."""


@dataclass(frozen=True)
class SweepSettings:
    trials: Annotated[int | None, SettingBound(least=1)] = None
    """Number of trials. Default: the whole grid of listed values, or 9 random trials if a setting has a range."""
    reduction: Annotated[int, SettingBound(least=2)] = 3
    """Reduction factor: 1/`reduction` of the trials continue after each rung."""
    rungs: Annotated[int | None, SettingBound(least=1)] = None
    """Number of rungs; 1 trains all trials to the end. Default: as many as leave one trial in the last rung."""

    def __post_init__(self) -> None:
        check_bounds(self, "sweep")

    def rungs_of(self, trials: int) -> list[tuple[float, int]]:
        """Return the rungs: the fraction of the budget at which each one ends, and the number of its trials."""
        most = 1
        while self.reduction**most <= trials:
            most += 1
        count = self.rungs or most
        return [
            (1 / self.reduction ** (count - 1 - rung), max(1, trials // self.reduction**rung)) for rung in range(count)
        ]


def run_sweep(
    recipe: Recipe,
    space: Space,
    settings: SweepSettings,
    folder: Path,
    *,
    workers: Sequence[RunLauncher],
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run all rungs and return the content of sweep.json, with its "folder".

    The same call resumes an interrupted sweep, also in the middle of a run. Failed trials are kept and end in the last
    place. Raises UsageError if a trial's recipe is wrong, if held-out losses of trials are not comparable, or if the
    folder holds a different sweep. Raises InfeasibleError if the first rung is shorter than a step, and ThriftyError if
    all trials failed.
    """
    recipe.refuse_missing_objects()
    if unequal := [path for path in space if path.partition(".")[0] in FIXED]:
        raise UsageError(
            f"--over {unequal[0]!r} cannot differ between trials",
            fix=f"leave out --over {unequal[0]}, and change the recipe",
        )
    points = sample_settings(space, settings.trials, recipe.seed)
    recipes = [with_settings(recipe, point) for point in points]
    recipes = [replace(each, evaluation=evaluated_like(recipe, each)) for each in recipes]
    check_alike([Variant("baseline", "baseline", recipe), *_variants(points, recipes)])
    rungs = settings.rungs_of(len(points))
    if (steps := recipe.budget.steps) and round(steps * rungs[0][0]) < 1:
        what = f"the first of {len(rungs)} rungs ends after '{rungs[0][0]:.2g}' of {steps} steps, before the first step"
        raise InfeasibleError(what, fix="--rungs 1; or a larger --budget")
    definition = {"recipe": recipe_to_data(recipe), "over": _plain(space), "sweep": asdict(settings)}
    inputs = input_identity({recipe.name: recipe}, say)
    with _open_sweep(folder, definition, points, inputs, say) as opened, closing_workers(workers):
        return _SweepRunner(recipe, recipes, rungs, opened, workers, say).run_all()


def _variants(points: Sequence[Settings], recipes: Sequence[Recipe]) -> list[Variant]:
    labels = [", ".join(f"{path}={value}" for path, value in point.items()) for point in points]
    return [Variant(label, label, each) for label, each in zip(labels, recipes, strict=True)]


def _plain(space: Space) -> dict[str, Any]:
    return {path: list(values) if isinstance(values, tuple) else asdict(values) for path, values in space.items()}


@contextmanager
def _open_sweep(
    path: Path,
    definition: Mapping[str, Any],
    points: Sequence[Settings],
    inputs: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[RunFolder]:
    """Yield the locked folder of the sweep. It is new, or belongs to an interrupted sweep with an equal definition and
    equal inputs.
    """
    is_there = (path / FILE).is_file()
    with RunFolder(path).lock() if is_there else RunFolder.create(path) as folder:
        if not is_there:
            trials = [{"run": f"trial-{place}", "settings": point, "rungs": []} for place, point in enumerate(points)]
            content = {"name": path.name, "definition": definition, "inputs": inputs, "trials": trials}
            folder.write_json("sweep", content)
        elif other := differences(folder.read_json("sweep")["definition"], redact(definition)):
            raise UsageError(
                f"'{path}' holds a different sweep: {'; '.join(other)}",
                fix="undo the change; or choose another --name",
            )
        saved = folder.read_json("sweep")
        refuse_changed_inputs(path, saved.get("inputs", {}), inputs, say, saved.get("status") == "finished")
        yield folder


@dataclass
class _SweepRunner:
    recipe: Recipe
    recipes: Sequence[Recipe]
    rungs: Sequence[tuple[float, int]]
    folder: RunFolder
    workers: Sequence[RunLauncher]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.state = self.folder.read_json("sweep")
        self.trials = self.state["trials"]
        self.write_lock = Lock()

    def run_all(self) -> dict[str, Any]:
        places = [*range(len(self.trials))]
        try:
            for rung, (fraction, count) in enumerate(self.rungs):
                places = places[:count]
                turns = [partial(self.train, place=place, rung=rung, fraction=fraction) for place in sorted(places)]
                run_on_workers(self.workers, turns)
                places = sorted(places, key=lambda place: self.rank(place, rung))
                if self.rank(places[0], rung) == math.inf:
                    unjudged = f"its held-out {self.recipe.evaluation.judge} is not finite"
                    last = next((trial["error"] for trial in reversed(self.trials) if "error" in trial), unjudged)
                    what, _, fix = last.partition(" fix: ")
                    raise ThriftyError(f"no trial is left: {what}", fix=fix or "narrow the ranges of the sweep")
        except RunStopped as stopped:
            return self.write("interrupted", stopped.exit_code)
        except BaseException as ended:
            self.write("interrupted", getattr(ended, "exit_code", getattr(ended, "code", 1)))
            raise
        return self.write("finished", 0, best=self.trials[places[0]]["run"])

    def rank(self, place: int, rung: int) -> float:
        """Return the measure of a trial at a rung, negated if higher is better; infinity for a failed trial."""
        measured = self.trials[place]["rungs"]
        return measured[rung]["rank"] if len(measured) > rung and measured[rung]["rank"] is not None else math.inf

    def train(self, worker: RunLauncher, place: int, rung: int, fraction: float) -> None:
        """Train a trial to the end of a rung. Raise RunStopped if its run was stopped."""
        trial = self.trials[place]
        if "error" in trial or len(trial["rungs"]) > rung:
            return
        pause = None if rung == len(self.rungs) - 1 else fraction
        kept = replace(self.recipe.checkpoints, keep=1, extra_steps=(), pause_at=pause)
        ended = worker(replace(self.recipes[place], name=trial["run"], checkpoints=kept), self.folder.path)
        if ended.status == "interrupted":
            raise RunStopped(ended.exit_code)
        summary = {} if ended.error else RunFolder(self.folder.path / trial["run"]).read_json("summary")
        loss, metrics = summary.get("held_out_loss"), summary.get("held_out", {})
        with self.write_lock:
            if loss is None:
                trial["error"] = ended.error or "its held-out loss is not finite"
            else:
                judged = {"loss": loss, **metrics}[self.recipe.evaluation.judge]
                rank = None if judged is None else worth(self.recipe.evaluation, loss, metrics)
                used = {name: summary[name] for name in ("steps", "tokens", "seconds")}
                trial["rungs"].append({"fraction": fraction, **used, "judged": judged, "rank": rank})
            self.write("running", 0)
            self.say(self.progress(trial, fraction, ended.elapsed))

    def progress(self, trial: Mapping[str, Any], fraction: float, seconds: float) -> str:
        if "error" in trial:
            result = f"failed: {trial['error']}"
        else:
            result = f"held-out {self.recipe.evaluation.judge} {significant(trial['rungs'][-1]['judged'], 4)}"
        settings = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in trial["settings"].items())
        done = sum(len(each["rungs"]) + ("error" in each) for each in self.trials)
        place = f"[{done}/{sum(count for _, count in self.rungs)}] {trial['run']}"
        return f"{place} ({settings}), {fraction:.0%} of the budget: {result} ({duration(seconds)})"

    def write(self, status: str, exit_code: int, **more: Any) -> dict[str, Any]:
        self.state |= {"status": status, "exit_code": exit_code, **more}
        self.folder.write_json("sweep", self.state)
        return self.folder.read_json("sweep") | {"folder": str(self.folder.path)}
