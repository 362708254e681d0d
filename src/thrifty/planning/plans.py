"""A plan: the recipe to run, what it is forecast to take, what came next, and why each technique is in it or not."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thrifty.core.accounting import settled
from thrifty.core.compose import Plain, compose
from thrifty.core.errors import Infeasible
from thrifty.core.explain import count
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.technique import Numerics
from thrifty.planning.axes import (
    ADAPTERS,
    AXES,
    MICRO_BATCHES,
    STRICTNESS,
    Catalogue,
    Way,
    lacking,
    micro_batches,
    ways_along,
)
from thrifty.planning.candidates import Candidate
from thrifty.planning.ledger import Entry, Record, record_of
from thrifty.planning.predict import COUNTED_HIGH, Estimate, largest_part
from thrifty.planning.reasons import Reason, Reasons
from thrifty.planning.search import FINALISTS, Search, TimeOf

STEPS = 1000
"""Of a run whose budget is none in steps, for what depends on them."""
SURE, UNSURE = 0.15, 3.0
"""How far off a step's time may be, as a share when its steps were run, as a factor when it was only counted."""
OUTSIDE = "installed by a third party, whose code is loaded only where a recipe names it: try it with --with"
MARGIN = 1.1
"""By how much a run may hold more than its probe did, until the ledger knows better."""


@dataclass(frozen=True)
class Wanted:
    """What a plan is asked for. Bytes, seconds, FLOP, money per hour."""

    allow: Numerics = Numerics.EXACT
    memory: float = math.inf
    seconds: float | None = None
    """The budget, or, beside tokens or FLOPs, the time they may take."""
    tokens: float | None = None
    flops: float | None = None
    price: float | None = None

    def budget(self, given: Budget, flops_per_step: float) -> Budget:
        if self.tokens is not None:
            return Budget(tokens=self.tokens)
        if self.flops is not None:
            steps = int(self.flops // flops_per_step)
            if steps < 1:
                raise Infeasible(
                    f"{self.flops:.3g} FLOP do not pay for one step of {flops_per_step:.3g}",
                    fix=f"--flops {flops_per_step * 100:.2g}, or a smaller model or data.batch",
                )
            return Budget(steps=steps)
        return Budget(seconds=self.seconds) if self.seconds is not None else given


@dataclass(frozen=True)
class Forecast:
    counted: float
    """Bytes of tensors at the peak."""
    memory: Estimate
    """Bytes at the peak as a run measures them: of the device on a GPU, of the process on a processor; of tensors alone
    where nothing was run."""
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

    def as_dict(self) -> dict[str, Any]:
        plain = {name: value.as_dict() for name, value in vars(self).items() if isinstance(value, Estimate)}
        dominant = {"memory": [*self.memory_is], "time": [*self.time_is]}
        return {"counted": self.counted, "cost": None, **plain, "dominant": dominant}


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    chosen: Candidate
    forecast: Forecast
    alternatives: tuple[tuple[Candidate, Forecast], ...]
    """Everything that was run, or counted to fit where nothing was run, from the fastest."""
    misfits: Mapping[str, str]
    reasons: tuple[Reason, ...]
    past: Mapping[str, Record]
    """The ledger's of "memory" and "step"."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "changes": [way.label for way in self.chosen.ways],
            "forecast": self.forecast.as_dict(),
            "past_error": {name: {"median": r.error, "runs": len(r.ratios)} for name, r in self.past.items()},
            "alternatives": [
                {"changes": [way.label for way in candidate.ways], "forecast": forecast.as_dict()}
                for candidate, forecast in self.alternatives
            ],
            "misfits": dict(self.misfits),
            "techniques": [reason.as_dict() for reason in self.reasons],
        }


def allowed_ways(
    recipe: Recipe, plain: Plain, catalogue: Catalogue, allow: Numerics, device: str
) -> tuple[dict[str, list[Way]], dict[str, list[Way]]]:
    """Along each axis the ways that may be gone, and those that what is asked for does not allow."""
    offers = AXES | {MICRO_BATCHES: micro_batches(plain.source.batch, plain.objective.joint)}
    if recipe.model.folder and not recipe.model.fresh:
        offers |= {"adapters": ADAPTERS}
    most = STRICTNESS.index(allow)
    free: dict[str, list[Way]] = {}
    barred: dict[str, list[Way]] = {}
    for axis, some in offers.items():
        for way in ways_along(axis, some, recipe.techniques, catalogue, device):
            where = free if STRICTNESS.index(way.numerics) <= most else barred
            where.setdefault(axis, []).append(way)
    return free, barred


@dataclass(frozen=True)
class Planner:
    """Plans for a recipe whose data are open. `rate` is FLOP/s that training reaches here, for plans without probes;
    `tokens` are those of an example."""

    recipe: Recipe
    plain: Plain
    catalogue: Catalogue
    wanted: Wanted
    device: torch.device
    tokens: int
    rate: float = 1e12
    time: TimeOf | None = None
    kept: Sequence[Entry] = ()
    outside: Sequence[str] = ()
    """Names of what third parties installed: their code is loaded only where a recipe names it."""
    evidence: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None
    finalists: int = FINALISTS

    def plan(self) -> Plan:
        """Raises Infeasible where nothing fits, or takes longer than it may."""
        with settled():
            return self._plan()

    def _plan(self) -> Plan:
        past = {"memory": record_of(self.kept, "memory", "memory"), "step": record_of(self.kept, "step", "step")}
        steps = self.recipe.budget.steps or STEPS
        kind = self.device.type
        free, barred = allowed_ways(self.recipe, self.plain, self.catalogue, self.wanted.allow, kind)
        margin = past["memory"].around(1.0, 1.0, MARGIN).high
        search = Search(
            self.plain,
            self.recipe.techniques,
            steps,
            free,
            self.wanted.memory,
            margin,
            self.device,
            self.time,
            self.say,
        )
        search.finalists = self.finalists
        chosen = search.run()
        _, bare = count(compose(self.plain, self.recipe.techniques, steps, self.device), ())
        budget = self.wanted.budget(self.recipe.budget, bare.flops)
        forecasts = {c.ways: self.forecast(c, budget, past) for c in search.tried}
        self._refuse_late(forecasts, search)
        told = Reasons(
            search, chosen, barred, self.catalogue, lacking(self.catalogue, kind), self.wanted.allow, self.evidence
        )
        name = f"{self.recipe.name}-planned"
        return Plan(
            recipe=replace(self.recipe, name=name, techniques=chosen.techniques, budget=budget),
            chosen=chosen,
            forecast=forecasts[chosen.ways],
            alternatives=tuple((c, forecasts[c.ways]) for c in search.ranked()),
            misfits={Candidate(ways, (), 0).label: why for ways, why in search.misfits.items()},
            reasons=(*told.all(), *(Reason(name, "not taken", OUTSIDE) for name in self.outside)),
            past=past,
        )

    def forecast(self, candidate: Candidate, budget: Budget, past: Mapping[str, Record]) -> Forecast:
        timing, footprint = candidate.timing, candidate.footprint
        assert footprint is not None
        if timing is None:
            step = Estimate.within(footprint.flops / self.rate, 1 / UNSURE, UNSURE)
            memory, started, aside = Estimate.within(footprint.memory, 0.9, COUNTED_HIGH), 0.0, 0.0
            time_is = ("not measured", 0.0)
        else:
            off = max(SURE, 2 * timing.spread)
            step = past["step"].around(candidate.step, 1 / (1 + off), 1 + off)
            held = max(timing.memory, footprint.memory)
            # a compiler's own memory is in what was seen, and is not taken again where its results are cached
            low = footprint.memory / held if candidate.is_compiled else 1.0
            memory = past["memory"].around(held, 0.9 * low, MARGIN)
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
        )

    def _refuse_late(self, forecasts: Mapping[tuple[Way, ...], Forecast], search: Search) -> None:
        """Raises Infeasible where the fastest candidate takes longer than it may."""
        limit = self.wanted.seconds
        if limit is None or (self.wanted.tokens is None and self.wanted.flops is None):
            return
        least = forecasts[search.best().ways].seconds
        if least.value > limit:
            share = limit / least.value
            raise Infeasible(
                f"the fastest that fits takes {least.value / 3600:.3g} h ({least.low / 3600:.3g} to "
                f"{least.high / 3600:.3g}), and may take {limit / 3600:.3g} h",
                fix=f"--hours {least.high / 3600:.2g}, {share:.0%} of the tokens, or a smaller model",
            )
