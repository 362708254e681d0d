"""What is asked of a plan, and what a candidate is forecast to take."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thrifty.core.errors import InfeasibleError
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.technique import Numerics
from thrifty.planning.cost_estimates import Estimate, StepTiming, largest_part
from thrifty.planning.disk_usage import disk_bytes
from thrifty.planning.forecast_ledger import PredictionRecord
from thrifty.planning.plan_candidate import PlanCandidate

SURE, UNSURE = 0.15, 3.0
"""How far off a step's time may be, as a share when its steps were run, as a factor when it was only counted."""
MARGIN = 1.1
"""By how much a run may hold more than its probe did, until the ledger knows better."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is asked for. Bytes, seconds, FLOP, money per hour."""

    allow: Numerics = Numerics.EXACT
    memory: float = math.inf
    disk: float = math.inf
    seconds: float | None = None
    """The budget, or, beside tokens or FLOPs, the time they may take."""
    tokens: float | None = None
    flops: float | None = None
    price: float | None = None

    def budget(self, default: Budget, flops_per_step: float) -> Budget:
        if self.tokens is not None:
            return Budget(tokens=self.tokens)
        if self.flops is not None:
            steps = int(self.flops // flops_per_step)
            if steps < 1:
                raise InfeasibleError(
                    f"{self.flops:.3g} FLOP do not pay for one step of {flops_per_step:.3g}",
                    fix=f"--flops {flops_per_step * 100:.2g}, or a smaller model or data.batch",
                )
            return Budget(steps=steps)
        return Budget(seconds=self.seconds) if self.seconds is not None else default

    def refuse_late(self, least: Estimate) -> None:
        """Raises InfeasibleError where the seconds of the fastest that fits are more than tokens or FLOPs may take."""
        limit = self.seconds
        if limit is None or (self.tokens is None and self.flops is None) or least.value <= limit:
            return
        raise InfeasibleError(
            f"the fastest that fits takes {least.value / 3600:.3g} h ({least.low / 3600:.3g} to "
            f"{least.high / 3600:.3g}), and may take {limit / 3600:.3g} h",
            fix=f"--hours {least.high / 3600:.2g}, {limit / least.value:.0%} of the tokens, or a smaller model",
        )


def refuse_no_step(
    budget: Budget, steps: float, step: float, tokens: float, startup: float = 0.0, unit: str = "tokens"
) -> None:
    """Raises InfeasibleError where a budget does not pay for one step of so many seconds and tokens, or what examples
    are counted in."""
    if steps >= 1:
        return
    if budget.seconds is not None:
        starting = f"starting is forecast to take {startup:.3g} s and " if startup else ""
        raise InfeasibleError(
            f"a budget of {budget.seconds:.3g} s does not fit one step: {starting}a step {step:.3g} s",
            fix=f"--hours {(startup + 10 * step) / 3600:.2g} or more",
        )
    raise InfeasibleError(
        f"a budget of {budget.tokens or 0:,.0f} {unit} does not fit one step of {tokens:,.0f}",
        fix=f"--tokens {tokens:.0f} or more, or a smaller data.batch",
    )


@dataclass(frozen=True)
class Forecast:
    counted: float
    """Bytes of tensors at the peak."""
    memory: Estimate
    """Bytes at the peak as a run measures them: of the device on a GPU, of the process on a processor beyond what it
    held before the model; of tensors alone where nothing was run."""
    step: Estimate
    tokens_per_second: Estimate
    seconds: Estimate
    """Until the budget is used up, evaluations and checkpoints included."""
    steps: Estimate
    tokens: Estimate
    cost: Estimate | None
    memory_is: tuple[str, float]
    """What most of the peak is, and its share."""
    time_is: tuple[str, float]
    disk: Mapping[str, float]
    """Bytes that a run takes on disk, by what takes them."""
    startup: float = 0.0
    """Seconds that are no steps: the start, an evaluation and a checkpoint."""
    others: float = 0.0
    """How many of the cores other work took while the step was measured, where it was enough to disturb it, ..."""
    cores: int = 1
    """... and how many there are."""
    process: float = 0.0
    """Bytes that the process holds before the model is built, on a processor: with `memory` it is all of it."""
    unit: str = "tokens"
    """Unit of examples, such as tokens or images."""

    def as_dict(self) -> dict[str, Any]:
        plain = {name: value.as_dict() for name, value in vars(self).items() if isinstance(value, Estimate)}
        dominant = {"memory": [*self.memory_is], "time": [*self.time_is]}
        besides = {"disk": dict(self.disk), "other_work": {"cores": self.others, "of": self.cores}}
        return {
            "counted": self.counted,
            "process": self.process,
            "unit": self.unit,
            "cost": None,
            **plain,
            "dominant": dominant,
            **besides,
        }


@dataclass(frozen=True, kw_only=True)
class Forecaster:
    """Forecasts for candidates of a recipe. `rate` is FLOP/s that training reaches on a device, for those that were not
    run; `tokens` are those of an example; `data` are bytes of prepared data."""

    recipe: Recipe
    wanted: PlanRequest
    device: torch.device
    tokens: int
    unit: str = "tokens"
    """The unit of examples, in which `tokens` are counted."""
    data: float = 0.0
    rate: float = 1e12
    process: float = 0.0
    """Bytes that a process on a processor holds without its run, as far as is known before one was probed."""

    def forecast(
        self, candidate: PlanCandidate, budget: Budget, past: Mapping[str, PredictionRecord], slowdown: float = 1.0
    ) -> Forecast:
        """`past` is the ledger's record of "memory" and "step"; `slowdown` is by how much steps of a run take longer
        than the fastest, by which candidates are compared."""
        timing, footprint = candidate.timing, candidate.footprint
        assert footprint is not None
        if timing is None:
            rate = self.rate * (1 if self.device.type == "cpu" else candidate.ranks)
            step = Estimate.within(footprint.flops / rate, 1 / UNSURE, UNSURE)
            memory, started, aside = Estimate.within(footprint.memory, 0.9, candidate.counted_high), 0.0, 0.0
            time_is = ("not measured", 0.0)
        else:
            step = _step(slowdown * candidate.least_step, timing, past["step"])
            peak = max(timing.memory, footprint.memory)
            # a compiler's own memory is in what was seen, and is not taken again where its results are cached
            low = footprint.memory / peak if candidate.is_compiled else 1.0
            memory = past["memory"].around(peak, 0.9 * low, MARGIN)
            aside = timing.evaluation / self.recipe.evaluation.every + timing.save / self.recipe.checkpoints.every
            share = timing.update / candidate.step
            time_is = ("update", share) if share > 0.5 else ("forward and backward", 1 - share)
            started = timing.startup + timing.evaluation + timing.save
        per_step = candidate.batch * self.tokens
        if budget.seconds is not None:
            steps = step.over(max(budget.seconds - started, 0.0))
            # as training does, the budget is divided among steps alone: evaluations and checkpoints come on top
            seconds = Estimate(budget.seconds, budget.seconds, budget.seconds + aside * steps.high)
        else:
            number = budget.steps or math.floor((budget.tokens or 0) / per_step)
            steps = Estimate(number, number, number)
            seconds = step.plus(aside).times(number).plus(started)
        return Forecast(
            counted=footprint.memory,
            memory=memory,
            step=step,
            tokens_per_second=step.over(per_step),
            seconds=seconds,
            steps=steps,
            tokens=steps.times(per_step),
            cost=seconds.times(self.wanted.price / 3600) if self.wanted.price is not None else None,
            memory_is=largest_part(footprint),
            time_is=time_is,
            disk=self.disk(candidate),
            startup=started,
            others=timing.others if timing and timing.is_disturbed else 0.0,
            cores=timing.cores if timing else 1,
            process=timing.process if timing else self.process,
            unit=self.unit,
        )

    def disk(self, candidate: PlanCandidate) -> dict[str, float]:
        whole = candidate.undivided or candidate.footprint
        assert whole is not None
        return disk_bytes(self.recipe.checkpoints, whole, candidate.techniques, self.data)


def _step(seconds: float, timing: StepTiming, past: PredictionRecord) -> Estimate:
    """On a quiet machine a step takes less than beside other work, by as much as that took at most."""
    off = max(SURE, 2 * timing.spread)
    step = past.around(seconds, 1 / (1 + off), 1 + off)
    if not timing.is_disturbed:
        return step
    return Estimate(step.value, step.low * max(1 - timing.others / timing.cores, 0.1), step.high)
