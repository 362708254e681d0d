"""Extension of the budget of a run, for `thrifty resume RUN --budget +10min`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from thrifty.core.recipe import Budget
from thrifty.training.time_budget import LEAST_STEPS


def extend(
    budget: Budget,
    extension: Mapping[str, float],
    step: int,
    steps: int,
    counters: Mapping[str, float],
    steps_within: Callable[[Budget], int],
) -> tuple[Budget, int]:
    """Return the extended budget and its number of steps, for a run that has made `step` of `steps` steps.

    An extension in the budget's unit is added to the amount. An extension in seconds otherwise follows the time that
    the run has used. Any other extension is converted to steps. `counters` are the counters of the run's state.
    """
    ((unit, amount),) = extension.items()
    before = getattr(budget, unit)
    if unit == "seconds":
        training = counters["seconds"]
        used = training if budget.counts == "training" else counters.get("used_seconds", training)
        seconds = round((used if before is None else before) + amount, 3)
        more = math.floor((seconds - used) / used * step)  # a first estimate at the mean speed so far
        return Budget(seconds=seconds, counts=budget.counts), step + max(LEAST_STEPS, more)
    if before is None:
        steps += steps_within(Budget(**{unit: amount}))  # type: ignore[arg-type]
        return Budget(steps=steps), steps
    extended = replace(budget, **{unit: type(before)(before + amount)})
    return extended, steps_within(extended)
