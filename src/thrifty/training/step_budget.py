"""Number of steps within a budget of steps, tokens, epochs or seconds."""

import math
import statistics
import time
from bisect import bisect_right

import torch

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core import mesh
from thrifty.core.batches import any_examples
from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.stages import Stage
from thrifty.training.determinism import deterministic_kernels
from thrifty.training.rank_sync import process_group_sync

PROBED = 4
"""Number of timed steps that convert a budget of seconds to a first number of steps. The first two are not averaged."""
PROBING = 0.05
"""Fraction of a budget that counts the start. If two timed steps take longer, the second is the last, and counts."""
SLOW = 0.5
"""Seconds of a slow step. If the second step takes longer, it is the last, and counts."""


def number_of_steps(recipe: Recipe, plain: BaseRun, device: torch.device, example_unit: int, unit: str) -> int:
    """Return the number of steps that the budget allows. Raise InfeasibleError if the budget allows no step. An example
    counts as `example_unit` units, such as tokens."""
    budget = recipe.budget
    if budget.steps is not None:
        return budget.steps
    source = _with_fixed_batch(recipe, plain, device).source
    # some techniques read more examples than they train on
    per_step = source.batch * mesh.axis("data").size * example_unit
    if budget.epochs is not None:
        whole = budget.in_epochs_of(source.examples and source.examples * example_unit)
        return 1 + steps_in_tokens(whole - 1, per_step, recipe, plain, device)  # the fewest that cover all examples
    if budget.tokens is None:
        raise UsageError("the recipe has no budget", fix="--budget 10min; or --budget 500steps; or --budget 1e7tokens")
    if budget.tokens < per_step:
        raise InfeasibleError(
            f"a budget of {budget.tokens:,.0f} {unit} is less than one step of {per_step:,}",
            fix=f"--budget {per_step}tokens or more; or a smaller data.batch",
        )
    return steps_in_tokens(budget.tokens, per_step, recipe, plain, device)


def _with_fixed_batch(recipe: Recipe, plain: BaseRun, device: torch.device) -> Run:
    """Return the run without techniques that change the batch size."""
    fixed = [technique for technique in recipe.techniques if technique.stage is not Stage.RESIZE]
    return compose(plain, fixed, 1, device)


def steps_in_tokens(budget: float, per_step: int, recipe: Recipe, plain: BaseRun, device: torch.device) -> int:
    """Return the maximum number of steps within a token budget. A step of the largest batch uses `per_step` tokens."""
    fixed = _with_fixed_batch(recipe, plain, device)
    if len(fixed.techniques) == len(recipe.techniques):
        return int(budget // per_step)
    batch = fixed.source.batch

    def spent(steps: int) -> float:
        source = compose(plain, recipe.techniques, steps, device).source  # the growth of batches may depend on steps
        return per_step * sum(source.size(step) for step in range(steps)) / batch

    most = 1
    while spent(2 * most) <= budget:
        most *= 2
    return most + bisect_right(range(most + 1, 2 * most), budget, key=spent)


def time_step(recipe: Recipe, plain: BaseRun, device: torch.device) -> float:
    """Return the measured seconds of a step. Some real steps with the run's final structure are made and discarded."""
    run = compose(plain, recipe.techniques, 1000, device)
    state = run.init_state()
    assert state.model is not None and state.optimizer is not None
    seconds: list[float] = []
    budget, all_ranks = recipe.budget, process_group_sync()
    most = PROBING * (budget.seconds or math.inf) if budget.counts == "run" else math.inf
    with deterministic_kernels(device, recipe.deterministic), any_examples():
        for step in range(run.steps - PROBED, run.steps):
            start = time.monotonic()
            run.backward(state.model, run.objective, run.source.at(step).to(device)).loss.item()
            state.optimizer.step()
            state.optimizer.zero_grad()
            seconds.append(time.monotonic() - start)
            if len(seconds) == 2 and all_ranks.run_first(lambda: sum(seconds) > most or seconds[1] > SLOW):
                break
    return all_ranks.run_first(lambda: statistics.median(seconds[2:] or seconds[1:]))


def steps_in_seconds(budget: Budget, began: float, step: float) -> int:
    """Return the first estimate of the number of steps within a time budget, for steps of `step` seconds."""
    assert budget.seconds is not None
    used = time.monotonic() - began if budget.counts == "run" else 0.0
    steps = process_group_sync().run_first(lambda: math.floor((budget.seconds - used) / step))
    if steps < 1:
        raise InfeasibleError(
            f"a budget of {budget.seconds:g} s is less than one step: the start takes {used:.1f} s, a step takes "
            f"{step:.2f} s",
            fix=f"--budget {math.ceil(used + 10 * step)}s or more",
        )
    return steps
