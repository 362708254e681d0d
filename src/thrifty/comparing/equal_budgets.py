"""Equal budgets: a pilot measures the cost of a variant's step, which sets the variant's number of steps.

A pilot is a whole run of a few steps. It therefore includes every event scheduled at a fraction of the run. A growing
model reaches all of its sizes, and the learning rate decays completely.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from torch import nn

from thrifty.comparing.variants import Variant
from thrifty.composition.compose import BaseRun, compose
from thrifty.core.batches import BatchSource
from thrifty.core.claims import Claim
from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.objective import Objective
from thrifty.core.recipe import Budget
from thrifty.training.run_folder import RunFolder

Equal = Literal["time", "flops", "tokens", "steps"]
EQUAL: tuple[Equal, ...] = ("time", "flops", "tokens", "steps")
PILOT = 24
"""Default number of steps of a variant's first pilot."""
WINDOW = 5
"""Length in steps of the running median. Each step time is compared with this median."""
ONCE = 2
"""Number of slow steps whose additional time is ignored, such as compilation at the start and after an interruption.
Events that occur more often count as cost, such as an update of a preconditioner at every tenth step.
"""
RATES = 1_000
"""Number of evenly spaced steps of a run at which the learning rate is checked."""
DECAYED = 0.3
"""Maximum final learning rate, relative to its peak, that counts as decayed. The limit is above 0.2, because a decay
over the last fifth of the run leaves 0.2 of the peak in the last step of a pilot.
"""


@dataclass(frozen=True)
class StepCost:
    """Average cost of a variant's step over a run."""

    seconds: float
    tokens: float
    flops: float
    """FLOPs of one traced step, in the model's full structure."""
    flops_vary: bool
    """True if batches or the structure change over the run, so that no single step represents all steps."""
    epoch_steps: float | None = None
    """Number of steps per epoch; None if the data have no epochs."""

    def of(self, equal: Equal) -> float:
        return {"time": self.seconds, "flops": self.flops, "tokens": self.tokens, "steps": 1.0}[equal]

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def steady(seconds: Sequence[float]) -> list[float]:
    """Return the step times with rare slow steps shortened. Excesses over the running median are clipped to the (`ONCE`
    + 1)-th largest excess.
    """
    reach = WINDOW // 2
    around = [median(seconds[max(0, index - reach) : index + reach + 1]) for index in range(len(seconds))]
    above = sorted((own - usual for own, usual in zip(seconds, around, strict=True)), reverse=True)
    most = max(0.0, above[ONCE]) if len(above) > ONCE else 0.0
    return [min(own, usual + most) for own, usual in zip(seconds, around, strict=True)]


def step_cost(folder: Path) -> StepCost:
    """Return the step cost of a finished run."""
    run = RunFolder(folder)
    records = run.read_records()
    steps = [record for record in records if record["kind"] == "step"]
    tokens = [after - before for before, after in pairwise([0, *(step["tokens"] for step in steps)])]
    times = steady([step["step_seconds"] for step in steps])
    return StepCost(
        seconds=fmean(times[1:] or times),
        tokens=fmean(tokens),
        flops=run.read_json("explanation")["footprint"]["flops"],
        flops_vary=len(set(tokens)) > 1 or any(record["kind"] == "change" for record in records),
        epoch_steps=run.read_json("summary").get("epoch_steps"),
    )


def refuse_undecayed(variants: Sequence[Variant], steps: int) -> None:
    """Raise UsageError if a variant's learning rate has not decayed at the end of a run of `steps` steps."""
    for variant in variants:
        if variant.optimizer is None or Claim.SCHEDULE in variant.optimizer.claims:
            continue
        plain = BaseRun(nn.Module, BatchSource(), Objective())
        plain.source.batch = variant.recipe.data.batch
        updating = [each for each in variant.recipe.techniques if each.overrides("update")]  # others need an objective
        update = compose(plain, updating, steps).transform()
        checked = [*range(0, steps, -(-steps // RATES)), steps - 1]
        rates = [update.rate(update.scalars(step, step)) for step in checked]
        if rates[-1] > DECAYED * max(rates):
            raise UsageError(
                f"{variant.label}: its learning rate ends at '{rates[-1] / max(rates):.0%}' of its peak, but must "
                f"decay to at most {DECAYED:.0%}, because a variant without decay looks worse than it is",
                fix="--with schedules.linear; or set the steps of the schedule as fractions of the run",
            )


def mean_cost(costs: Sequence[StepCost]) -> StepCost:
    """Return the step cost with the mean time of several pilots of one variant. All pilots have the same tokens and
    FLOPs.
    """
    return replace(costs[0], seconds=fmean(cost.seconds for cost in costs))


def steps_of_baseline(budget: Budget, cost: StepCost) -> int:
    """Return the baseline's number of steps. Raises UsageError if the recipe has no budget, and InfeasibleError if the
    budget is below one step.
    """
    if budget.steps is not None:
        return budget.steps
    if budget.epochs is not None:
        return budget.in_epochs_of(cost.epoch_steps)
    if budget.seconds is not None:
        steps = int(budget.seconds / cost.seconds)
    elif budget.tokens is not None:
        steps = int(budget.tokens / cost.tokens)
    else:
        raise UsageError(
            "the recipe has no budget",
            fix="--budget 10min; or --budget 500steps; or --budget 1e7tokens",
        )
    if steps < 1:
        raise InfeasibleError("the budget is below the cost of one step", fix="use a larger --budget")
    return steps


def steps_of_variants(variants: Sequence[Variant], costs: Mapping[str, StepCost], equal: Equal) -> dict[str, int]:
    """Return for each label the number of steps that costs as much as the baseline's run. Raises UsageError if budgets
    have equal FLOPs but the FLOPs of a variant change over its run.
    """
    for variant in variants:
        if equal == "flops" and costs[variant.label].flops_vary:
            raise UsageError(
                f"{variant.label}: its FLOPs change over the run, but only the FLOPs of its last steps are counted",
                fix="--equal-budget time",
            )
    budget = steps_of_baseline(variants[0].recipe.budget, costs[variants[0].label])
    amount = budget * costs[variants[0].label].of(equal)
    steps = {variant.label: int(amount / costs[variant.label].of(equal) + 1e-6) for variant in variants} | {
        variants[0].label: budget
    }
    for label, count in steps.items():
        if count < 1:
            raise InfeasibleError(f"{label}: a step costs more than the whole budget", fix="use a larger --budget")
    return steps
