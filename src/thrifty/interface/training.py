"""Training of models: `train`, `resume`, `steps`, and the run that these functions return."""

import os
import signal
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from rich.console import RenderableType
from torch import nn

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.randomness import draws_of_caller
from thrifty.core.recipe import Argument, Recipe
from thrifty.core.technique import Technique
from thrifty.core.user_objects import BuildModel, UserObjects
from thrifty.interface.plans import plan
from thrifty.interface.recipe_arguments import Function, Metric, RecipeArguments, named_metrics, recipe_from
from thrifty.interface.recipe_arguments import recipe as recipe_of
from thrifty.interface.run_endings import ending, next_commands
from thrifty.interface.run_reports import RunReport, charts_of, report_run
from thrifty.interface.run_samples import sample_of_run
from thrifty.recipes.recipe_toml import recipe_from_data
from thrifty.reporting.bar_page import shorten
from thrifty.reporting.measured_result import MeasuredResult, Rows
from thrifty.reporting.printed_result import lines
from thrifty.reporting.run_record import is_run_folder, read_run, run_folder
from thrifty.reporting.run_rows import run_rows
from thrifty.training import trainer
from thrifty.training.checkpoint_index import CheckpointChoice
from thrifty.training.loop import Record
from thrifty.training.rank_launch import on_ranks
from thrifty.training.train_session import Observer
from thrifty.training.trained_model import load_trained_model, stored_recipe

SHOWN = 200
"""Maximum number of printed characters of a sample, about forty tokens."""
OBJECTS = ("model", "data", "held_out", "loss", "metrics", "collate")


class RunResult(MeasuredResult):
    """A finished run: its folder and its summary."""

    def __init__(self, folder: Path, summary: Mapping[str, Any], objects: UserObjects):
        self.folder, self.summary, self.objects = folder, summary, objects

    @property
    def loss(self) -> float | None:
        """Held-out loss at the last evaluation."""
        return self.summary.get("held_out_loss")

    @property
    def metrics(self) -> dict[str, float]:
        """Held-out metrics at the last evaluation."""
        return dict(self.summary.get("held_out", {}))

    @cached_property
    def model(self) -> nn.Module:
        """Trained model of the newest checkpoint, loaded at the first access; see `load_model`."""
        return self.load_model()

    def load_model(self, checkpoint: CheckpointChoice = "last") -> nn.Module:
        """Return the model of a checkpoint ("best", "last" or a step) in evaluation mode, with adapters merged.
        Adapters that cannot be merged, such as bottleneck adapters, remain.
        """
        with draws_of_caller("cpu"):
            try:
                return load_trained_model(self.folder, checkpoint, objects=self.objects)[0]
            except RefusedError:
                return load_trained_model(self.folder, checkpoint, plain=False, objects=self.objects)[0]

    def report(self) -> RunReport:
        """Write the HTML page of the run, and return the run's key figures; see `thrifty.report`."""
        return report_run(self)

    @property
    def page(self) -> Path:
        """HTML page of the run. `report` writes it."""
        return self.folder / "report.html"

    def rows(self) -> Rows:
        return run_rows(read_run(self.folder))

    def charts(self) -> dict[str, Mapping[str, Any]]:
        return charts_of(read_run(self.folder))

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return self.summary["exit_code"]

    def as_dict(self) -> dict[str, Any]:
        return dict(self.summary)

    @cached_property
    def sample(self) -> str | None:
        """Text that the trained language model generates, or the reason why there is none. None for other models, and
        for large models, because generation takes long.
        """
        made = sample_of_run(self, read_run(self.folder))
        return f"no sample: {made['reason']}" if "reason" in made else made.get("text")

    @property
    def recipe(self) -> Recipe:
        """Recipe of the run, with the objects that were passed."""
        return replace(recipe_from_data(stored_recipe(self.folder)), objects=self.objects)

    def __rich__(self) -> RenderableType:
        printed = ending(self.summary)
        if self.summary["status"] == "finished" and is_run_folder(self.folder):
            text = self.sample
            printed += ["\nsample", textwrap.indent(shorten(text, SHOWN), "  ")] if text else []
            printed += ["\nnext", *(f"  {command}" for command in next_commands(self.summary, self.recipe))]
        return lines(*printed)


class RunInterrupted(KeyboardInterrupt):
    """Interruption of a run by Ctrl-C (SIGINT) after a saved step. `run` is the run so far. The message contains the
    call that resumes the run.

    Example::

        try:
            run = thrifty.train(recipe=recipe)
        except thrifty.RunInterrupted as stopped:
            run = stopped.run
    """

    def __init__(self, run: RunResult):
        super().__init__(f"saved after step {run.summary['steps']:,}; resume it with {run.summary['resume']}")
        self.run = run


class RunTerminated(SystemExit):
    """Interruption of a run by SIGTERM after a saved step. If not caught, it ends the process with exit code 143."""

    def __init__(self, run: RunResult):
        super().__init__(run.exit_code)
        self.run = run


def _uninterrupted(run: RunResult) -> RunResult:
    """Return a run that ended normally. Raise RunInterrupted or RunTerminated if a signal stopped the run."""
    stops = {128 + signal.SIGINT: RunInterrupted, 128 + signal.SIGTERM: RunTerminated}
    if stop := stops.get(run.exit_code):
        raise stop(run)
    return run


def train(
    model: nn.Module | BuildModel | str | Path | None = None,
    data: Any = None,
    *,
    model_arguments: Mapping[str, Argument] | None = None,
    held_out: Any = None,
    loss: Function | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    techniques: Sequence[str | Technique | type[Technique]] = (),
    budget: int | str | None = None,
    batch: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    name: str | None = None,
    seed: int | None = None,
    device: str | None = None,
    settings: Mapping[str, Any] | None = None,
    recipe: Recipe | str | Path | None = None,
    memory: str | float | None = None,
    observers: Sequence[Observer] = (),
    ranks: int = 1,
    runs: str | Path = "runs",
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> RunResult:
    """Train a model and return the run, which is stored in the folder `runs`/`name`. Without `name`, a number is added
    to the recipe's name if the folder exists: "text-2".

    The arguments up to `recipe` are as in `thrifty.recipe`.

    Args:
        memory: Memory limit, "24GB" or bytes. `thrifty.plan` then adds techniques so that the run fits. It may also add
            techniques that make the run faster. Values change at most by rounding.
        observers: Functions that are called with the record of each step: step number, loss, learning rate and gradient
            norm. After an evaluation the record also has `held_out_loss`, `metrics` and `model`. If a function returns
            False, the run is saved and stops; it can be resumed.
        ranks: Number of processes to start on this machine. Under torchrun or srun, the run uses the processes that
            they start.
        origins: Origin of each value of the recipe, for reports.

    Raises UsageError if arguments do not fit, if objects cannot be sent to other processes, or if the run folder `name`
    exists. After Ctrl-C, the current step is finished and saved. Then RunInterrupted is raised, a KeyboardInterrupt
    that contains the `run` and the call that resumes it. After SIGTERM, RunTerminated is raised, a SystemExit.

    Example::

        run = thrifty.train(model=build_model, data=train_set, held_out=test_set, loss=loss, budget="10 steps")
    """
    chosen = recipe_of(
        model,
        data,
        model_arguments=model_arguments,
        held_out=held_out,
        loss=loss,
        metrics=metrics,
        techniques=techniques,
        budget=budget,
        batch=batch,
        collate=collate,
        name=name,
        seed=seed,
        device=device,
        settings=settings,
        recipe=recipe,
    )
    _refuse_single(observers)
    if memory is not None:
        chosen = replace(plan(chosen, memory=memory, allow="rounding", quiet=quiet).recipe, name=chosen.name)
    options = {"numbered": name is None, "origins": origins, "observers": observers, "quiet": quiet}
    summary = on_ranks(ranks, trainer.train, chosen, Path(runs), **options)
    return _uninterrupted(RunResult(Path(summary["folder"]), summary, chosen.objects))


def resume(
    run: RunResult | str | Path,
    *,
    model: nn.Module | BuildModel | str | None = None,
    data: Any = None,
    held_out: Any = None,
    loss: Function | None = None,
    metrics: Mapping[str, Metric] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    recipe: Recipe | None = None,
    budget: str | None = None,
    fork: str | None = None,
    drop_weights: bool = False,
    observers: Sequence[Observer] = (),
    ranks: int = 1,
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> RunResult:
    """Resume a run from its newest undamaged checkpoint. The result is bit-identical to an uninterrupted run.

    Args:
        run: Run, run folder, or its name under ./runs.
        model, data, held_out, loss, metrics: The same objects that were passed to `train`.
        budget: Extension of the budget, such as "+10min", "+500steps", "+1e6tokens" or "+2epochs". A finished run
            continues too. Schedules follow the new length, and the extension is recorded.
        fork: Name of a new run that continues from the old run with a changed `recipe`.
        drop_weights: True to drop weights that the changed recipe does not contain.
        observers, ranks, origins: As in `train`.

    Raises UsageError if an object is missing or its source differs.

    Example::

        run = thrifty.resume("runs/mine", model=build_model, data=train_set, held_out=test_set, loss=loss)
    """
    own = {"model": model, "data": data, "held_out": held_out, "loss": loss, "collate": collate}
    _refuse_single(observers)
    objects = UserObjects.from_arguments(**own, metrics=named_metrics(metrics))
    folder, chosen = _started(run, recipe, objects)
    options = {"budget": budget, "fork": fork, "drop_weights": drop_weights, "origins": origins}
    summary = on_ranks(ranks, trainer.resume, folder, chosen, **options, observers=observers, quiet=quiet)
    return _uninterrupted(RunResult(folder.parent / fork if fork else folder, summary, chosen.objects))


def steps(
    run: RunResult | Recipe | str | Path | None = None,
    *,
    ranks: int = 1,
    runs: str | Path = "runs",
    quiet: bool = True,
    **arguments: Unpack[RecipeArguments],
) -> Iterator[Record]:
    """Yield the record of each training step. The `for` loop over the records drives the training.

    Args:
        run: Recipe (object, name or file) to start in the folder `runs`/name, or a run to resume.
        arguments: As in `thrifty.recipe`.

    Records are the same as for observers of `thrifty.train`. Leaving the loop early saves the run, which can be
    resumed. Training runs in this process. Under torchrun or srun, each rank runs its own loop.

    Raises UsageError as `train` and `resume` do, and if `ranks` exceeds the number of started processes.

    Example::

        for record in thrifty.steps(recipe):
            if record.loss < 0.1:
                break
    """
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks not in (1, there):
        raise UsageError(
            f"thrifty.steps runs in this process, but {ranks} ranks require {ranks} processes",
            fix=f"torchrun --nproc-per-node {ranks} script.py, or thrifty.train(…, ranks={ranks}, observers=[…])",
        )
    if isinstance(run, RunResult) or (isinstance(run, str | Path) and is_run_folder(Path(run))):
        passed = {name: arguments[name] for name in OBJECTS if name in arguments}  # type: ignore[literal-required]
        folder, chosen = _started(run, None, UserObjects.from_arguments(**passed))
        summary = yield from trainer.draws_apart(trainer.resume_steps(folder, chosen, quiet=quiet), chosen)
    else:
        chosen, is_unnamed = recipe_from("steps", run, arguments), arguments.get("name") is None
        started = trainer.train_steps(chosen, Path(runs), numbered=is_unnamed, quiet=quiet)
        summary = yield from trainer.draws_apart(started, chosen)
    _uninterrupted(RunResult(Path(summary["folder"]), summary, chosen.objects))


def _refuse_single(observers: Any) -> None:
    if callable(observers):
        raise UsageError("observers is a function, not a list of functions", fix="observers=[function]")


def _started(run: RunResult | str | Path, recipe: Recipe | None, objects: UserObjects) -> tuple[Path, Recipe]:
    """Return the folder of a run, and its stored recipe with the passed objects."""
    folder = run_folder(run)
    if isinstance(run, RunResult) and not objects.is_passed:
        objects = run.objects
    recipe = recipe or recipe_from_data(stored_recipe(folder))
    return folder, replace(recipe, objects=objects) if objects.is_passed else recipe
