"""The trainer on the user's own model, data, loss and metrics: `train`, `resume` and the run that they return."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from thrifty.core.errors import UsageError
from thrifty.core.recipe import Recipe
from thrifty.core.technique import Technique
from thrifty.core.user_objects import BuildModel, UserObjects
from thrifty.interface.recipe_arguments import Function
from thrifty.interface.recipe_arguments import recipe as recipe_of
from thrifty.recipes.recipe_toml import recipe_from_data
from thrifty.reporting.run_record import RunRecord, read_run
from thrifty.training import trainer
from thrifty.training.trained_model import load_trained_model, stored_recipe


class RunResult:
    """A run folder and how its run ended. `model` is loaded when it is first used."""

    def __init__(self, folder: Path, summary: Mapping[str, Any], objects: UserObjects):
        self.folder, self.summary, self._objects = folder, summary, objects

    @property
    def loss(self) -> float | None:
        """Loss on the held-out data at the last evaluation."""
        return self.summary.get("held_out_loss")

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics on the held-out data at the last evaluation."""
        return dict(self.summary.get("held_out", {}))

    @property
    def model(self) -> nn.Module:
        """The trained model in evaluation mode, without what techniques had put on it."""
        return load_trained_model(self.folder, model=self._objects.model)[0]

    def report(self) -> RunRecord:
        """Return the record of the run, which a notebook shows as its report."""
        return read_run(self.folder)

    def records(self) -> Any:
        """Return the records of all steps as a `pandas.DataFrame`. Raises UsageError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise UsageError("records need pandas, which is not installed", fix="pip install pandas") from error
        return pandas.DataFrame(list(self.report().steps))

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        loss = "no loss" if self.loss is None else f"loss {self.loss:.4g}"
        return f"RunResult({str(self.folder)!r}: {self.summary.get('status')}, {loss}{metrics})"


def train(
    model: nn.Module | BuildModel | str | Path | None = None,
    data: Any = None,
    *,
    held_out: Any = None,
    loss: Function | str | None = None,
    metrics: Mapping[str, Function] | None = None,
    techniques: Sequence[str | Technique | type[Technique]] = (),
    budget: int | str | None = None,
    batch: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    name: str | None = None,
    seed: int | None = None,
    device: str | None = None,
    recipe: Recipe | None = None,
    runs: str | Path = "runs",
    quiet: bool = False,
) -> RunResult:
    """Train a model and return the run, which is kept in the folder `runs`/`name`.

    `runs` and `quiet` apart, the arguments are those of `thrifty.recipe`. Raises UsageError for arguments that do not
    fit, and for a run folder that exists.

    Example::

        run = thrifty.train(model=build_model, data=train_set, held_out=test_set, loss=loss, budget="10 steps")
    """
    chosen = recipe_of(
        model,
        data,
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
        recipe=recipe,
    )
    summary = trainer.train(chosen, Path(runs), quiet=quiet)
    return RunResult(Path(runs) / chosen.name, summary, chosen.objects)


def resume(
    run: str | Path,
    *,
    model: nn.Module | BuildModel | None = None,
    data: Any = None,
    held_out: Any = None,
    loss: Function | None = None,
    metrics: Mapping[str, Function] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    quiet: bool = False,
) -> RunResult:
    """Resume a run from its newest undamaged checkpoint, to the bits of one that was not interrupted.

    Objects that were passed to `train` are passed again. Raises UsageError if one is missing or its source differs.
    """
    objects = UserObjects(model, data, held_out, loss, dict(metrics or {}), collate)
    folder = Path(run)
    recipe = replace(recipe_from_data(stored_recipe(folder)), objects=objects)
    return RunResult(folder, trainer.resume(folder, recipe, quiet=quiet), objects)
