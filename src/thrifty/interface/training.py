"""The trainer on the user's own model, data, loss and metrics: `train`, `resume` and the run that they return."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from thrifty.core.errors import UsageError
from thrifty.core.plain_values import read_budget
from thrifty.core.recipe import Budget, DataSettings, ModelSettings, ObjectiveSettings, Recipe
from thrifty.core.technique import Technique
from thrifty.data.user_data import dataset_of
from thrifty.interface.own_loop import technique_of
from thrifty.recipes.recipe_toml import recipe_from_data
from thrifty.reporting.run_record import RunRecord, read_run
from thrifty.techniques import find
from thrifty.training import trainer
from thrifty.training.trained_model import load_trained_model, stored_recipe
from thrifty.training.user_objects import UserObjects

Loss = Callable[[nn.Module, Any], Any] | str


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
        return load_trained_model(self.folder, build=self._objects.model)[0]

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
    model: nn.Module | Callable[[], nn.Module] | str | Path | None = None,
    data: Any = None,
    *,
    held_out: Any = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Callable[[nn.Module, Any], Any]] | None = None,
    techniques: Sequence[str | Technique | type[Technique]] = (),
    budget: int | str | None = None,
    batch: int | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    name: str = "run",
    runs: str | Path = "runs",
    recipe: Recipe | None = None,
    seed: int = 0,
    device: str = "auto",
    quiet: bool = False,
) -> RunResult:
    """Train a model and return the run, which is kept in the folder `runs`/`name`.

    `model` is a module, a function that builds one, a preset or a Hugging Face folder. `data` and `held_out` are
    map-style datasets, `datasets.Dataset`s or DataLoaders, or `data` is a path or a known name. `loss(model, batch)`
    returns one loss for each example, losses and weights of their parts, or a mean; or it is the name of an objective.
    Functions in `metrics` have the same form. `budget` is "20 steps", "1e7 tokens", "3 epochs", "90s", "10min", "2h" or
    a number of steps; `batch` the effective batch in examples. Without an optimizer among `techniques` it is AdamW.
    `recipe` gives everything that is not passed; by default it is `llama-nano` on `python-stdlib` for 500 steps.

    Raises UsageError for arguments that do not fit, and for a run folder that exists.

    Example::

        run = thrifty.train(model=build_model, data=train_set, held_out=test_set, loss=loss, budget="10 steps")
    """
    base = recipe or Recipe(name, seed=seed, device=device)
    objects = UserObjects(_builder(model), None, None, None, dict(metrics or {}), collate)
    if isinstance(model, str | Path):
        base = replace(base, model=_model_settings(model))
    batch_size = batch
    if isinstance(data, str | Path):
        base = replace(base, data=replace(base.data, source=str(data)))
    elif data is not None:
        if held_out is None:
            raise UsageError("data of your own need held-out data to be judged by", fix="held_out=a second dataset")
        batch_size = batch or dataset_of(data)[2]
        objects = replace(objects, data=data, held_out=held_out)
    if isinstance(loss, str):
        base = replace(base, objective=ObjectiveSettings(loss))
    elif loss is not None:
        objects = replace(objects, loss=loss)
    if batch_size is not None:
        base = replace(base, data=replace(base.data, batch=batch_size))
    chosen = tuple(technique_of(each, {}) for each in techniques) or base.techniques
    base = replace(base, techniques=_with_optimizer(chosen))
    if budget is not None:
        base = replace(base, budget=_budget(budget, data, base.data))
    summary = trainer.train(base, Path(runs), objects=objects, quiet=quiet)
    return RunResult(Path(runs) / base.name, summary, objects)


def resume(
    run: str | Path,
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    data: Any = None,
    held_out: Any = None,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    metrics: Mapping[str, Callable[[nn.Module, Any], Any]] | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    quiet: bool = False,
) -> RunResult:
    """Resume a run from its newest undamaged checkpoint, to the bits of one that was not interrupted.

    Objects that were passed to `train` are passed again. Raises UsageError if one is missing or its source differs.
    """
    objects = UserObjects(_builder(model), data, held_out, loss, dict(metrics or {}), collate)
    folder = Path(run)
    summary = trainer.resume(folder, recipe_from_data(stored_recipe(folder)), objects=objects, quiet=quiet)
    return RunResult(folder, summary, objects)


def _builder(model: Any) -> Callable[[], nn.Module] | None:
    if isinstance(model, nn.Module):
        return partial(copy.deepcopy, model)
    return model if callable(model) else None


def _model_settings(model: str | Path) -> ModelSettings:
    return ModelSettings(folder=str(Path(model).resolve())) if Path(model).is_dir() else ModelSettings(str(model))


def _with_optimizer(chosen: tuple[Technique, ...]) -> tuple[Technique, ...]:
    from thrifty.core.claims import Claim

    decided = any(Claim.OPTIMIZER in each.claims for each in chosen)
    return chosen if decided else (*chosen, find("optimizers.adamw")())


def _budget(budget: int | str, data: Any, settings: DataSettings) -> Budget:
    if isinstance(budget, int):
        return Budget(steps=budget)
    number, _, unit = budget.strip().partition(" ")
    if unit.strip() in ("epoch", "epochs"):
        if data is None or isinstance(data, str | Path):
            raise UsageError(f"the budget {budget!r} needs a dataset whose examples are counted", fix='"1e7 tokens"')
        try:
            return Budget(steps=math.ceil(float(number) * len(dataset_of(data)[0]) / settings.batch))
        except ValueError:
            raise UsageError(f"the budget {budget!r} is not an amount", fix='"3 epochs"') from None
    return Budget(**read_budget(budget, "the budget"))  # type: ignore[arg-type]
