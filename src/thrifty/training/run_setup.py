"""Setup of a run from a recipe: the data are opened, and the techniques are composed."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.index_check import refuse_indices_without_row
from thrifty.core import mesh
from thrifty.core.batches import Batch
from thrifty.core.errors import STARTED, refuse_unknown
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.objective import Objective
from thrifty.core.ranks import ranks
from thrifty.core.recipe import Budget, Recipe
from thrifty.data.catalogue import refuse_model_to_be_fetched
from thrifty.data.run_data import RunData
from thrifty.data.text.text_data import print_to_stderr
from thrifty.models import build_run_model, check_model
from thrifty.objectives import chosen_objective
from thrifty.training.data_opening import open_first_on_rank_0
from thrifty.training.rank_setup import choose_device, mesh_sizes
from thrifty.training.rank_sync import process_group_sync
from thrifty.training.step_budget import number_of_steps, steps_in_seconds, time_step

EXAMPLES, MOST_BATCHES, LOOKING = 16, 64, 0.2
"""Limits of the search for an index without an embedding row: examples per batch, batches per epoch, seconds."""


@dataclass(frozen=True)
class PreparedRun:
    """A recipe with opened data and composed techniques, ready to start or to resume."""

    recipe: Recipe
    data: RunData
    run: Run
    began: float = field(default_factory=time.monotonic)
    """Time of the start, in seconds of time.monotonic()."""
    step_seconds: float = 0.0
    """Measured seconds of a step in the run's final structure; 0 if it was not measured."""

    @property
    def unit(self) -> str:
        """Unit of examples, such as tokens or images."""
        return self.data.facts.get("unit", "tokens")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of data and loss that the summary repeats."""
        facts, loss_in = dict(self.data.facts), self.run.plain.objective.loss_in
        if self.recipe.objective.name != "next_token" and "bytes_per_token" in facts:
            # only next-token prediction measures how far the text can be compressed
            facts["bytes_per_token"] = None
        return facts | ({"loss_in": loss_in} if loss_in != "nats" else {})

    @property
    def recipe_in_steps(self) -> Recipe:
        """The recipe with a budget in epochs converted to steps."""
        if self.recipe.budget.epochs is None:
            return self.recipe
        return replace(self.recipe, budget=Budget(steps=self.steps_within(self.recipe.budget)))

    def steps_within(self, budget: Budget) -> int:
        """Return the number of steps that a budget in steps, tokens or epochs allows."""
        return number_of_steps(
            replace(self.recipe, budget=budget), self.run.plain, self.run.device, self.data.example_unit, self.unit
        )


def _ignore(text: str) -> None:
    pass


def prepare_run(
    recipe: Recipe,
    steps: int | None = None,
    quiet: bool = False,
    phase: Callable[[str], None] = _ignore,
    before: Path | None = None,
) -> PreparedRun:
    """Open the data and compose the run. Raise UsageError if an object that the recipe names was not passed. `steps` is
    the number of steps of a resumed run; by default the recipe's budget determines it. For a budget in seconds, some
    real steps are timed. `phase` is called with a text at the start of each phase. `before` is the folder of the run
    that continues."""
    began = _command_start()
    recipe.refuse_missing_objects()
    device, model = choose_device(recipe.device), recipe.objects.model
    chosen_objective(recipe.objective)
    if model is None:  # checked before the data, whose preparation may take long
        refuse_model_to_be_fetched(Path(recipe.model.folder))
        if recipe.objects.data is None:
            check_model(recipe.model, recipe.objective.name)
    if ranks() > 1:
        mesh.set_mesh(mesh_sizes(recipe, ranks()), device.type)
    phase("opening the data")
    objective, data = open_first_on_rank_0(recipe, _ignore if quiet else print_to_stderr, before)

    is_folder = model is None and bool(recipe.model.folder) and not recipe.model.reinitialize
    is_trained = is_folder or isinstance(model, nn.Module)
    plain = BaseRun(partial(build_run_model, recipe, data.ends), data.train, objective, is_trained)
    if model is not None or recipe.objects.data is not None:  # otherwise the model is built for the data
        process_group_sync().run_first(
            lambda: refuse_indices_without_row(plain, _batches_to_check(recipe, data, objective))
        )
    budget, step_seconds = recipe.budget, 0.0
    steps = steps or budget.estimate
    if steps is None and budget.seconds is not None:
        phase("timing some steps")
        step_seconds = time_step(recipe, plain, device)
        steps = steps_in_seconds(budget, began, step_seconds)
    steps = steps or number_of_steps(recipe, plain, device, data.example_unit, data.facts.get("unit", "tokens"))
    run = compose(plain, recipe.techniques, steps, device)
    measures = ("loss", *run.eval_objective.metrics)
    refuse_unknown("evaluation.judge names no measure of this run:", recipe.evaluation.judge, measures)
    return PreparedRun(recipe, data, run, began, step_seconds)


def _command_start() -> float:
    """Return the start of the command in seconds of time.monotonic(). For later runs of a process, and for calls from
    Python, return the time now."""
    now = time.monotonic()
    return min(float(os.environ.pop(STARTED, now)), now)


def _batches_to_check(recipe: Recipe, data: RunData, objective: Objective) -> Iterator[Batch]:
    """Yield batches for the search for an index without an embedding row. The held-out examples that evaluations use
    come first, then training examples spread over an epoch. Each part takes at most LOOKING seconds."""
    yield from _until_time_limit(data.held_out.batches(recipe.evaluation.examples, EXAMPLES))
    source = data.train
    epoch = -(-source.examples // source.batch) if source.examples else 1
    rows, steps = min(source.batch, EXAMPLES), range(0, epoch, -(-epoch // MOST_BATCHES))
    for batch in _until_time_limit(source.rows(step, 0, rows) for step in steps):
        if isinstance(data.ends, TextModelSpec) and "tokens" in batch.fields:  # the largest token may be rare
            batch["tokens"][0, [0, -1]] = data.ends.vocabulary - 1
        yield objective.examples(batch)


def _until_time_limit(batches: Iterable[Batch]) -> Iterator[Batch]:
    began = time.monotonic()
    for batch in batches:
        yield batch
        if time.monotonic() - began > LOOKING:
            return
