"""Requests for a plan, and forecasts of candidates.

A candidate is a recipe with options of the plan. A probe times steps of a candidate in a separate process. The ledger
contains predicted and measured values of earlier runs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from thrifty.core.errors import InfeasibleError
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.technique import Numerics
from thrifty.planning.cost_estimates import Estimate, StepTiming, largest_part
from thrifty.planning.forecast_ledger import PredictionRecord
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.training.evaluation import EVALUATIONS
from thrifty.training.required_room import disk_bytes
from thrifty.training.step_budget import PROBED

SURE, UNSURE = 0.15, 3.0
"""Error of a predicted step time: a fraction for measured steps, a factor for steps with only counted FLOPs."""
PROCESS = (0.95, 1.1)
"""Bounds of a process before it builds the model, relative to that of a probe."""
MARGIN = 1.1
"""Factor from the memory of a probe to the maximum memory of a run, until the ledger has enough runs."""


@dataclass(frozen=True)
class PlanRequest:
    """Limits and budget of a plan, in bytes, seconds, FLOP, and money per hour."""

    allow: Numerics = Numerics.EXACT
    memory: float = math.inf
    disk: float = math.inf
    seconds: float | None = None
    """Budget in seconds. If `tokens` or `flops` is set, the time limit for that budget."""
    tokens: float | None = None
    flops: float | None = None
    price: float | None = None

    def budget(self, default: Budget, flops_per_step: float) -> Budget:
        if self.tokens is not None:
            return Budget(tokens=self.tokens)
        if self.flops is not None:
            if not flops_per_step:
                raise InfeasibleError(
                    "FLOPs are no budget for this model: a step has no matrix products, convolutions or attention",
                    fix="a budget of time, steps or tokens",
                )
            steps = int(self.flops // flops_per_step)
            if steps < 1:
                raise InfeasibleError(
                    f"a budget of {self.flops:.3g} FLOP is less than one step of {flops_per_step:.3g}",
                    fix=f"--flops {flops_per_step * 100:.2g}; or use a smaller model or data.batch",
                )
            return Budget(steps=steps)
        return Budget(seconds=self.seconds) if self.seconds is not None else default

    def is_in_time(self, seconds: Estimate) -> bool:
        """Return False if a forecast exceeds the time limit for a budget of tokens or FLOPs."""
        return self.seconds is None or (self.tokens is None and self.flops is None) or seconds.value <= self.seconds

    def refuse_late(self, least: Estimate) -> None:
        """Raise InfeasibleError if the forecast of the fastest candidate exceeds the time limit."""
        if self.is_in_time(least) or (limit := self.seconds) is None:
            return
        raise InfeasibleError(
            f"the fastest candidate that fits takes {least.value / 3600:.3g} h ({least.low / 3600:.3g} to "
            f"{least.high / 3600:.3g}); the limit is {limit / 3600:.3g} h",
            fix=f"--hours {least.high / 3600:.2g}; or use {limit / least.value:.0%} of the budget; or a smaller model",
        )


def refuse_no_step(
    budget: Budget, steps: float, step: float, tokens: float, startup: float = 0.0, unit: str = "tokens"
) -> None:
    """Raise InfeasibleError if the budget is smaller than one step of `step` seconds and `tokens` tokens.

    `unit` is the unit of `tokens`, such as tokens or images.
    """
    if steps >= 1:
        return
    if budget.seconds is not None:
        starting = f"startup takes about {startup:.3g} s and " if startup else ""
        raise InfeasibleError(
            f"a budget of {budget.seconds:.3g} s is less than one step: {starting}a step takes {step:.3g} s",
            fix=f"--hours {(startup + 10 * step) / 3600:.2g} or more",
        )
    raise InfeasibleError(
        f"a budget of {budget.tokens or 0:,.0f} {unit} is less than one step of {tokens:,.0f}",
        fix=f"--tokens {tokens:.0f} or more; or use a smaller data.batch",
    )


@dataclass(frozen=True)
class Forecast:
    counted: float
    """Counted bytes of tensors at peak memory."""
    memory: Estimate
    """Peak memory in bytes, as a run measures it. On a GPU: device memory. On a CPU: process memory, minus the process
    memory before the model is built. Without a probe: tensors only."""
    step: Estimate
    tokens_per_second: Estimate
    seconds: Estimate
    """Seconds of the whole run, including evaluations and checkpoints."""
    steps: Estimate
    tokens: Estimate
    cost: Estimate | None
    memory_is: tuple[str, float]
    """Name and fraction of the largest part of peak memory."""
    time_is: tuple[str, float]
    disk: Mapping[str, float]
    """Bytes on disk, by kind of data."""
    startup: float = 0.0
    """Seconds outside of steps: startup, one evaluation and one checkpoint."""
    others: float = 0.0
    """Number of cores used by other processes during the measurement, if the measurement was disturbed; else 0."""
    cores: int = 1
    """Number of cores of the machine."""
    process: float = 0.0
    """Bytes of the process before the model is built, on a CPU. The whole process has `process` + `memory` bytes."""
    unit: str = "tokens"
    """Unit of examples, such as tokens or images."""

    @property
    def peak(self) -> Estimate:
        """Peak memory with the process. A run imports more than a probe, so its process may be larger."""
        whole, low, high = (self.process * factor for factor in (1.0, *PROCESS))
        return Estimate(self.memory.value + whole, self.memory.low + low, self.memory.high + high)

    def as_dict(self) -> dict[str, Any]:
        plain = {name: value.as_dict() for name, value in vars(self).items() if isinstance(value, Estimate)}
        dominant = {"memory": [*self.memory_is], "time": [*self.time_is]}
        further = {"disk": dict(self.disk), "other_work": {"cores": self.others, "of": self.cores}}
        return {
            "counted": self.counted,
            "process": self.process,
            "unit": self.unit,
            "cost": None,
            **plain,
            "dominant": dominant,
            **further,
        }


@dataclass(frozen=True, kw_only=True)
class Forecaster:
    """Forecaster for candidates of a recipe.

    `rate` is the FLOP/s that training reaches on one device; it is used for candidates without a probe. `tokens` is the
    number of tokens per example. `data` is the size of prepared data in bytes.
    """

    recipe: Recipe
    request: PlanRequest
    device: torch.device
    tokens: int
    unit: str = "tokens"
    """Unit of `tokens`, such as tokens or images."""
    data: float = 0.0
    rate: float = 1e12
    process: float = 0.0
    """Expected bytes of a process before it builds the model, on a CPU. Used until the first probe."""
    kept: Callable[[PlanCandidate], float] = lambda candidate: 0.0
    """Function that returns the bytes of a process in addition to tensors, for candidates without a probe."""
    loading: float = 0.0
    """Seconds from the start of a command until PyTorch is loaded."""

    def forecast(
        self, candidate: PlanCandidate, budget: Budget, past: Mapping[str, PredictionRecord], slowdown: float = 1.0
    ) -> Forecast:
        """Return the forecast of a candidate.

        `past` is the accuracy of earlier predictions of "memory" and "step", from the ledger. `slowdown` is the ratio
        of median to minimum step time. It is required, because candidates are compared by minimum step time.
        """
        timing, footprint = candidate.timing, candidate.footprint
        assert footprint is not None
        if timing is None:
            if not footprint.flops:
                raise InfeasibleError(
                    "step times of this model are only known from probes: a step has no matrix products, convolutions "
                    "or attention whose FLOPs could be counted",
                    fix="plan with probes: without --no-probe (in Python: probe=True), and with more --seconds",
                )
            factor = math.prod(option.factor for option in candidate.options)  # the factor of ranks divides the work
            step = Estimate.within(factor * footprint.flops / self.rate, 1 / UNSURE, UNSURE)
            memory = Estimate.within(footprint.memory, 0.9, candidate.counted_high).plus(self.kept(candidate))
            started = aside = 0.0
            time_is = ("not measured", 0.0)
        else:
            step = _step(slowdown * candidate.least_step, timing, past["step"])
            peak = max(timing.memory, footprint.memory)
            # the probe includes memory of the compiler, which a run with cached compilation does not use
            low = footprint.memory / peak if candidate.is_compiled else 1.0
            memory = past["memory"].around(peak, 0.9 * low, MARGIN)
            aside = timing.evaluation / self.recipe.evaluation.every + timing.save / self.recipe.checkpoints.every
            share = timing.update / candidate.step
            time_is = ("update", share) if share > 0.5 else ("forward and backward", 1 - share)
            started = timing.startup + timing.evaluation + timing.save
        per_step = candidate.batch * self.tokens
        if budget.seconds is not None and budget.counts == "run":
            evaluations = (EVALUATIONS - 1) * timing.evaluation if timing else 0.0
            outside = started + self.loading + PROBED * step.value + evaluations
            steps = step.over(max(budget.seconds - outside, 0.0))
            seconds = Estimate(budget.seconds, budget.seconds, budget.seconds)
        elif budget.seconds is not None:
            steps = step.over(budget.seconds)
            whole = budget.seconds + started
            seconds = Estimate(whole, whole, whole + aside * steps.high)
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
            cost=seconds.times(self.request.price / 3600) if self.request.price is not None else None,
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
    """Return the estimate of a step's seconds.

    For a disturbed probe, the lower bound is reduced by the fraction of cores that other processes used."""
    error = max(SURE, 2 * timing.spread)
    step = past.around(seconds, 1 / (1 + error), 1 + error)
    if not timing.is_disturbed:
        return step
    return Estimate(step.value, step.low * max(1 - timing.others / timing.cores, 0.1), step.high)
