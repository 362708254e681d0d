"""Equal budgets: the counted cost of a variant's step sets the budget of its runs.

Steps, tokens and FLOPs are counted before the first run. For equal time, all runs have the same budget in seconds, and
each run adapts its number of steps to the machine. A pilot per variant, a whole run of a few steps, measures the first
estimate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
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
from thrifty.training.time_budget import AIM, steady

Equal = Literal["time", "flops", "tokens", "steps"]
EQUAL: tuple[Equal, ...] = ("time", "flops", "tokens", "steps")
PILOT = 24
"""Default number of steps of a pilot."""
JUDGED_ON = ("unit", "loss_in", "unigram_entropy", "bytes_per_token", "label_entropy")
"""Facts of a run that must be equal for held-out losses to be comparable."""
RATES = 1_000
"""Number of evenly spaced steps of a run at which the learning rate is checked."""
DECAYED = 0.3
"""Maximum final learning rate, relative to its peak, that counts as decayed. The limit is above 0.2, because a decay
over the last fifth of the run leaves 0.2 of the peak in the last step of a pilot.
"""


@dataclass(frozen=True)
class StepCost:
    """Counted cost of a variant's step, and facts of its run."""

    steps: int
    """Number of steps of the counted run."""
    tokens: float
    """Mean number of tokens of a step."""
    flops: float
    """FLOPs of one traced step, in the model's full structure."""
    flops_vary: bool
    """True if batches or the structure change over the run, so that no single step represents all steps."""
    judged_on: Mapping[str, Any]
    """Facts named in `JUDGED_ON`."""

    def of(self, equal: Equal) -> float:
        return {"flops": self.flops, "tokens": self.tokens}.get(equal, 1.0)

    def planned(self, budget: Budget, seconds: float | None) -> dict[str, Any]:
        """Return a run's budget, with its amounts in each unit. `seconds` is the time of a step, if it is known."""
        steps = budget.steps or budget.estimate or 1
        step = {"seconds": seconds, "tokens": self.tokens, "flops": self.flops, "flops_vary": self.flops_vary}
        amounts = {name: steps * step[name] for name in ("tokens", "flops")}
        amounts["seconds"] = budget.seconds or (seconds and steps * seconds)
        limits = asdict(budget) if budget.seconds else {"steps": steps}
        limits = {name: value for name, value in limits.items() if value is not None}
        return {"steps": steps, **amounts, "step": step, "budget": limits}


def planned_budget(planned: Mapping[str, Any]) -> Budget:
    """Return the budget of the runs from the result of `StepCost.planned`. Earlier versions planned steps alone."""
    return Budget(**planned.get("budget", {"steps": planned["steps"]}))


def counted_budget(budget: Budget, equal: Equal, pilot: int) -> Budget:
    """Return the budget with which the baseline is counted. Equal time requires no number of steps for a budget in
    seconds. Otherwise, some timed steps convert it."""
    if budget.seconds is None:
        return budget
    return (
        Budget(steps=pilot, counts="training") if equal == "time" else Budget(seconds=budget.seconds, counts="training")
    )


def measured_step(folder: Path) -> float:
    """Return the mean step time of a finished run in seconds, without its first step."""
    records = RunFolder(folder).read_records()
    times = steady([record["step_seconds"] for record in records if record["kind"] == "step"])
    return fmean(times[1:] or times)


def refuse_undecayed(variants: Sequence[Variant], lengths: Mapping[str, int]) -> None:
    """Raise UsageError if a variant's learning rate has not decayed at the end of its run. `lengths` are numbers of
    steps by label.
    """
    for variant in variants:
        steps = lengths[variant.label]
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


def budgets_of_variants(
    variants: Sequence[Variant], costs: Mapping[str, StepCost], equal: Equal, seconds: Mapping[str, float]
) -> dict[str, Budget]:
    """Return the budget of each variant's runs, by label. `seconds` are step times, which only equal time requires.

    Raises UsageError if budgets have equal FLOPs but the FLOPs of a variant change over its run. Raises InfeasibleError
    if a budget is below one step.
    """
    baseline, planned = variants[0], costs[variants[0].label]
    total = planned.steps * planned.of(equal)
    if equal == "time":
        total = baseline.recipe.budget.seconds or planned.steps * seconds[baseline.label] / AIM
    budgets = {}
    for label, cost in ((variant.label, costs[variant.label]) for variant in variants):
        if equal == "flops" and cost.flops_vary:
            raise UsageError(
                f"{label}: its FLOPs change over the run, but only the FLOPs of its last steps are counted",
                fix="--equal-budget time",
            )
        if total < (step := seconds[label] if equal == "time" else cost.of(equal)):
            raise InfeasibleError(f"{label}: a step costs more than the whole budget", fix="use a larger --budget")
        if equal == "time":
            estimate = max(1, math.floor(AIM * total / step + 1e-6))
            budgets[label] = Budget(seconds=total, counts="training", estimate=estimate)
        else:
            budgets[label] = Budget(steps=int(total / step + 1e-6))
    return budgets
