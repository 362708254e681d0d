"""A plan: the recipe to run, what it is forecast to take, what came next, and why each technique is in it or not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isinf
from statistics import median
from time import monotonic
from typing import Any

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import count, trained_batch_norms
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.technique import Numerics
from thrifty.core.tensor_tracing import gc_frozen
from thrifty.planning.choice_explanations import ChoiceExplainer, ChoiceReason
from thrifty.planning.forecast import MARGIN, UNSURE, Forecast, Forecaster, refuse_no_step
from thrifty.planning.forecast_ledger import LedgerEntry, PredictionRecord, prediction_record
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import FINALISTS, NO_ROOM, PlanSearch, TimeOf
from thrifty.planning.rank_options import RANKS, options_over_ranks
from thrifty.planning.search_space import (
    ADAPTER_OPTIONS,
    AXES,
    MICRO_BATCHES,
    NUMERICS_ORDER,
    Catalogue,
    PlanOption,
    micro_batches,
    missing_requirements,
    options_along,
)

STEPS = 1000
"""Of a run whose budget is none in steps, for what depends on them."""
SHARE, FLOOR = 0.2, 60.0
"""The share of a run's time that planning it may take, and the seconds that it may take of the shortest run: the recipe
is run, its options are counted, and a few combinations are run."""
OUTSIDE = "installed by a third party, whose code is loaded only where a recipe names it: try it with --with"


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    chosen: PlanCandidate
    forecast: Forecast
    alternatives: tuple[tuple[PlanCandidate, Forecast], ...]
    """Everything that was run, or counted to fit where nothing was run, from the fastest."""
    misfits: Mapping[str, str]
    reasons: tuple[ChoiceReason, ...]
    past: Mapping[str, PredictionRecord]
    """The ledger's of "memory" and "step"."""
    stopped: str = ""
    """Notice that the time for planning was up, with the skipped work; empty if it was not."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "changes": [way.label for way in self.chosen.ways],
            "ranks": self.chosen.ranks,
            "forecast": self.forecast.as_dict(),
            "past_error": {name: {"median": r.error, "runs": len(r.ratios)} for name, r in self.past.items()},
            "alternatives": [
                {"changes": [way.label for way in candidate.ways], "forecast": forecast.as_dict()}
                for candidate, forecast in self.alternatives
            ],
            "misfits": dict(self.misfits),
            "stopped": self.stopped,
            "techniques": [reason.as_dict() for reason in self.reasons],
        }


def allowed_options(
    recipe: Recipe, plain: BaseRun, catalogue: Catalogue, allow: Numerics, device: str, ranks: int = 1
) -> tuple[dict[str, list[PlanOption]], dict[str, list[PlanOption]]]:
    """Along each axis the ways that may be gone, and those that what is asked for does not allow."""
    batch = plain.source.batch
    offers = AXES | {MICRO_BATCHES: micro_batches(batch, plain.objective.joint)}
    if ranks > 1:
        offers |= {RANKS: tuple(options_over_ranks(ranks, batch, device))}
    if plain.is_trained:
        offers |= {"adapters": ADAPTER_OPTIONS}
    most, norms = NUMERICS_ORDER.index(allow), trained_batch_norms(plain)
    free: dict[str, list[PlanOption]] = {}
    barred: dict[str, list[PlanOption]] = {}
    for axis, some in offers.items():
        for way in options_along(axis, some, recipe.techniques, catalogue, device, norms):
            where = free if NUMERICS_ORDER.index(way.numerics) <= most else barred
            where.setdefault(axis, []).append(way)
    return free, barred


@dataclass(frozen=True, kw_only=True)
class Planner(Forecaster):
    """Plans for a recipe whose data are open. There may be as many `ranks`, or one. Planning takes `seconds` since it
    `began`, or a fifth of what the run takes and at least a minute."""

    plain: BaseRun
    catalogue: Catalogue
    time: TimeOf | None = None
    kept: Sequence[LedgerEntry] = ()
    outside: Sequence[str] = ()
    """Names of what third parties installed: their code is loaded only where a recipe names it."""
    evidence: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None
    finalists: int = FINALISTS
    ranks: int = 1
    shared: bool = False
    """Whether the memory wanted is there for all ranks together, and not for each."""
    free: float = inf
    """Bytes that this machine has for a probe."""
    seconds: float | None = None
    began: float = field(default_factory=monotonic)

    @gc_frozen()
    def plan(self) -> Plan:
        """Raises InfeasibleError where nothing fits, or takes longer than it may."""
        records = {ranks: self._records(ranks) for ranks in {1, self.ranks}}
        steps = self.recipe.budget.steps or STEPS
        kind = self.device.type
        free, barred = allowed_options(self.recipe, self.plain, self.catalogue, self.wanted.allow, kind, self.ranks)
        margin = max(past["memory"].around(1.0, 1.0, MARGIN).high for past in records.values())
        search = PlanSearch(
            self.plain,
            self.recipe.techniques,
            steps,
            free,
            self.wanted.memory,
            margin,
            self.time,
            self.finalists,
            self.no_room,
            self.shared,
            self.process,
            self.free,
            self._allowance,
            self.began,
            device=self.device,
            say=self.say,
        )
        chosen = search.run()
        budget = self.budget
        slowdown = median([c.step / c.least_step for c in search.tried if c.timing] or [1.0])
        forecasts = {c.ways: self.forecast(c, budget, records[c.ranks], slowdown) for c in search.tried}
        forecast = forecasts[chosen.ways]
        per_step = chosen.batch * self.tokens
        refuse_no_step(budget, forecast.steps.value, forecast.step.value, per_step, forecast.startup, self.unit)
        self.wanted.refuse_late(forecast.seconds)
        told = ChoiceExplainer(
            search,
            chosen,
            barred,
            self.catalogue,
            missing_requirements(self.catalogue, kind),
            self.wanted.allow,
            self.evidence,
        )
        name = f"{self.recipe.name}-planned"
        return Plan(
            recipe=replace(
                self.recipe,
                name=name,
                techniques=chosen.techniques,
                mesh=chosen.mesh if chosen.ranks > 1 else self.recipe.mesh,
                budget=budget,
            ),
            chosen=chosen,
            forecast=forecast,
            alternatives=tuple((c, forecasts[c.ways]) for c in search.ranked()),
            misfits={PlanCandidate(ways, (), 0).label: why for ways, why in search.misfits.items()},
            reasons=(*told.all(), *(ChoiceReason(name, "not taken", OUTSIDE) for name in self.outside)),
            past=records[chosen.ranks],
            stopped=self._stopped(search),
        )

    @cached_property
    def budget(self) -> Budget:
        flops = self._plain_flops(self.recipe.budget.steps or STEPS) if self.wanted.flops is not None else 1.0
        return self.wanted.budget(self.recipe.budget, flops)

    @cached_property
    def _unsure_step(self) -> float:
        """Seconds of a step before any was run: of small models, which reach less of a machine."""
        return UNSURE * self._plain_flops(self.recipe.budget.steps or STEPS) / self.rate

    def _allowance(self, step: float) -> float:
        """Seconds that planning may take where a step takes so many."""
        if self.seconds is not None:
            return self.seconds
        seconds = self.budget.seconds
        if seconds is None:
            steps = self.budget.steps or (self.budget.tokens or 0) / (self.plain.source.batch * self.tokens)
            seconds = steps * (self._unsure_step if isinf(step) else step)
        return max(SHARE * seconds, FLOOR)

    def _stopped(self, search: PlanSearch) -> str:
        if not search.stopped:
            return ""
        limit = "--seconds" if self.seconds is not None else "a fifth of what the run takes, or a minute"
        return (
            f"stopped after {search.seconds_taken:.0f} s, with {search.stopped}: "
            f"{search.allowance(search.fastest):.0f} s are {limit}; --seconds {search.further_seconds} looks further"
        )

    def _records(self, ranks: int) -> dict[str, PredictionRecord]:
        """How well memory and steps of runs over so many ranks were told."""
        alike = [entry for entry in self.kept if entry.ranks == ranks]
        return {name: prediction_record(alike, name, name) for name in ("memory", "step")}

    def no_room(self, candidate: PlanCandidate) -> str:
        """Why a candidate does not fit the disk; "" where it does."""
        taken = self.disk(candidate)
        if sum(taken.values()) <= self.wanted.disk:
            return ""
        parts = ", ".join(f"{size / 1e6:,.0f} MB of {name}" for name, size in taken.items())
        return f"{NO_ROOM}: {parts}"

    def _plain_flops(self, steps: int) -> float:
        """Of a step without techniques."""
        _, bare = count(compose(self.plain, self.recipe.techniques, steps, self.device), ())
        return bare.flops
