"""Counting of a variant's step, without training."""

from pathlib import Path
from statistics import fmean

from thrifty.comparing.equal_budgets import JUDGED_ON, StepCost
from thrifty.composition.compose import Run
from thrifty.core.batches import any_examples
from thrifty.core.recipe import Recipe
from thrifty.core.run_relative_settings import moments_of
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.recipes.short_budgets import without_slow_start
from thrifty.training.rank_setup import ranks_of
from thrifty.training.run_folder import RunFolder
from thrifty.training.run_setup import prepare_run
from thrifty.training.session_start import counted_facts

SAMPLED, MOST_SAMPLED = 4, 64
"""Numbers of evenly spaced steps whose tokens are counted: at first, and if the first counts differ."""


def count_run(recipe: Recipe, runs: Path) -> StepCost:
    """Count a step of a recipe's run on fake tensors, without training. Raise the error with which the run would
    fail before its first step. The counted facts, which later runs reuse, are written to runs/NAME.json."""
    with ranks_of(recipe):
        recipe = without_slow_start(recipe, lambda text: None)  # as the run does
        prepared = prepare_run(recipe, quiet=True)
        run = prepared.run
        tokens = _sampled_tokens(run, SAMPLED)
        vary = len(set(tokens)) > 1
        tokens = _sampled_tokens(run, MOST_SAMPLED) if vary else tokens
        counted = counted_facts(prepared)
        RunFolder(runs).write_json(recipe.name, counted)
        return StepCost(
            steps=run.steps,
            tokens=fmean(tokens),
            flops=counted["explanation"]["footprint"]["flops"],
            flops_vary=vary or any(map(_changes_flops, run.techniques)),
            judged_on={name: prepared.facts[name] for name in JUDGED_ON if name in prepared.facts},
        )


def _sampled_tokens(run: Run, count: int) -> list[int]:
    count = min(count, run.steps)
    steps = {round(number * (run.steps - 1) / max(1, count - 1)) for number in range(count)}
    with any_examples():
        return [run.objective.tokens(run.source.at(step)) for step in sorted(steps)]


def _changes_flops(technique: Technique) -> bool:
    """Return True if a technique changes the model's structure, or the size of examples, after the first step."""
    moments = [moment for _, moment, _ in moments_of(technique)]
    if not any(max(moment) if isinstance(moment, tuple) else moment for moment in moments):
        return False
    return technique.stage is Stage.RESHAPE or technique.changes(0, TrainState()) is not None
