"""Plans: a recipe, its forecast, alternatives, and the reason for or against each technique."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isinf
from statistics import median
from time import monotonic
from typing import Any

from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import count
from thrifty.composition.fake_runs import trained_batch_norms
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.technique import Numerics
from thrifty.core.tensor_tracing import gc_frozen
from thrifty.planning.candidate_trials import TimeOf
from thrifty.planning.choice_explanations import ChoiceExplainer, ChoiceReason
from thrifty.planning.forecast import MARGIN, UNSURE, Forecast, Forecaster, refuse_no_step
from thrifty.planning.forecast_ledger import LedgerEntry, PredictionRecord, prediction_record
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import FINALISTS, NO_ROOM, PlanSearch
from thrifty.planning.proven_gains import ProvenGain
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
"""Assumed number of steps of a run if its budget is not in steps."""
SHARE, FLOOR = 0.2, 60.0
"""Time limit of planning: a fraction of the run's time, and a minimum in seconds. The minimum is enough to probe the
recipe, to count the memory and FLOPs of its options, and to probe a few combinations."""
OUTSIDE = "third-party technique, loaded only if the recipe names it: add it with --with"


@dataclass(frozen=True)
class Plan:
    recipe: Recipe
    chosen: PlanCandidate
    forecast: Forecast
    alternatives: tuple[tuple[PlanCandidate, Forecast], ...]
    """All candidates that fit (probed, or counted without probes), sorted by expected time to equal loss."""
    misfits: Mapping[str, str]
    reasons: tuple[ChoiceReason, ...]
    past: Mapping[str, PredictionRecord]
    """Accuracy of earlier predictions of "memory" and "step", from the ledger."""
    stopped: str = ""
    """Notice that planning stopped at its time limit, with the skipped work; empty if no work was skipped."""
    limit: float = inf
    """Memory limit in bytes."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe.name,
            "changes": [option.label for option in self.chosen.options],
            "ranks": self.chosen.ranks,
            "forecast": self.forecast.as_dict(),
            "past_error": {name: {"median": r.error, "runs": len(r.ratios)} for name, r in self.past.items()},
            "alternatives": [
                {"changes": [option.label for option in candidate.options], "forecast": forecast.as_dict()}
                for candidate, forecast in self.alternatives
            ],
            "misfits": dict(self.misfits),
            "stopped": self.stopped,
            "techniques": [reason.as_dict() for reason in self.reasons],
        }


def allowed_options(
    recipe: Recipe, plain: BaseRun, catalogue: Catalogue, allow: Numerics, device: str, ranks: int = 1
) -> tuple[dict[str, list[PlanOption]], dict[str, list[PlanOption]]]:
    """Return the allowed options by axis, and the options by axis that `allow` excludes."""
    batch = plain.source.batch
    offers = AXES | {MICRO_BATCHES: micro_batches(batch, plain.objective.joint)}
    if ranks > 1:
        offers |= {RANKS: tuple(options_over_ranks(ranks, batch, device))}
    if plain.is_trained:
        offers |= {"adapters": ADAPTER_OPTIONS}
    most, norms = NUMERICS_ORDER.index(allow), trained_batch_norms(plain)
    allowed: dict[str, list[PlanOption]] = {}
    disallowed: dict[str, list[PlanOption]] = {}
    for axis, templates in offers.items():
        for option in options_along(axis, templates, recipe.techniques, catalogue, device, norms):
            group = allowed if NUMERICS_ORDER.index(option.numerics) <= most else disallowed
            group.setdefault(axis, []).append(option)
    return allowed, disallowed


@dataclass(frozen=True, kw_only=True)
class Planner(Forecaster):
    """Planner for a recipe with opened data, on up to `ranks` ranks.

    Planning stops `seconds` after `began`. By default, `seconds` is a fifth of the run's time, but at least a minute.
    """

    plain: BaseRun
    catalogue: Catalogue
    time: TimeOf | None = None
    ledger: Sequence[LedgerEntry] = ()
    outside: Sequence[str] = ()
    """Names of third-party techniques. Their code is loaded only if the recipe names them."""
    evidence: Mapping[str, str] = field(default_factory=dict)
    gains: Sequence[ProvenGain] = ()
    """Techniques that change the result of training, with a gain that comparisons proved."""
    say: Callable[[str], None] = lambda text: None
    finalists: int = FINALISTS
    ranks: int = 1
    shared: bool = False
    """True if the requested memory is for all ranks together, False if it is per rank."""
    free: float = inf
    """Free memory of this machine for a probe, in bytes."""
    seconds: float | None = None
    began: float = field(default_factory=monotonic)

    @gc_frozen()
    def plan(self) -> Plan:
        """Return the plan. Raises InfeasibleError if no candidate fits the memory and the time limit."""
        records = {ranks: self._records(ranks) for ranks in {1, self.ranks}}
        steps = self.recipe.budget.steps or STEPS
        kind = self.device.type
        allow = self.request.allow
        allowed, disallowed = allowed_options(self.recipe, self.plain, self.catalogue, allow, kind, self.ranks)
        margin = max(past["memory"].around(1.0, 1.0, MARGIN).high for past in records.values())
        search = PlanSearch(
            self.plain,
            self.recipe.techniques,
            steps,
            allowed,
            self.request.memory,
            margin,
            self.time,
            self.no_room,
            self.shared,
            self.process,
            self.kept,
            self.free,
            self._allowance,
            self.began,
            finalists=self.finalists,
            gains=self.gains,
            wider={option.numerics for options in disallowed.values() for option in options},
            device=self.device,
            say=self.say,
        )
        chosen = search.run()
        budget = self.budget
        slowdown = median([c.step / c.least_step for c in search.tried if c.timing] or [1.0])
        forecasts = {c.options: self.forecast(c, budget, records[c.ranks], slowdown) for c in search.tried}
        if not self.request.is_in_time(forecasts[chosen.options].seconds):
            self.request.refuse_late(min((each.seconds for each in forecasts.values()), key=lambda each: each.value))
            chosen = search.best([c for c in search.tried if self.request.is_in_time(forecasts[c.options].seconds)])
        forecast = forecasts[chosen.options]
        per_step = chosen.batch * self.tokens
        refuse_no_step(budget, forecast.steps.value, forecast.step.value, per_step, forecast.startup, self.unit)
        explainer = ChoiceExplainer(
            search,
            chosen,
            disallowed,
            self.catalogue,
            missing_requirements(self.catalogue, kind),
            self.request.allow,
            self.evidence,
            self.gains,
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
            alternatives=tuple((c, forecasts[c.options]) for c in search.ranked()),
            misfits={PlanCandidate(options, (), 0).label: why for options, why in search.misfits.items()},
            reasons=(*explainer.all(), *(ChoiceReason(name, "not taken", OUTSIDE) for name in self.outside)),
            past=records[chosen.ranks],
            stopped=self._stopped(search),
            limit=self.request.memory,
        )

    @cached_property
    def budget(self) -> Budget:
        flops = self._plain_flops(self.recipe.budget.steps or STEPS) if self.request.flops is not None else 1.0
        return self.request.budget(self.recipe.budget, flops)

    @cached_property
    def _unsure_step(self) -> float:
        """Expected seconds of a step before the first probe, computed with the low FLOP/s of small models."""
        return UNSURE * self._plain_flops(self.recipe.budget.steps or STEPS) / self.rate

    def _allowance(self, step: float) -> float:
        """Return the time limit of planning in seconds, for a step of `step` seconds."""
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
        limit = "--seconds" if self.seconds is not None else "a fifth of the run's time, at least a minute"
        return (
            f"stopped after {search.seconds_taken:.0f} s and skipped {search.stopped}: the limit is "
            f"{search.allowance(search.fastest):.0f} s ({limit}); raise it: --seconds {search.further_seconds}"
        )

    def _records(self, ranks: int) -> dict[str, PredictionRecord]:
        """Return the accuracy of earlier predictions of "memory" and "step" for runs on `ranks` ranks."""
        alike = [entry for entry in self.ledger if entry.ranks == ranks]
        return {name: prediction_record(alike, name, name) for name in ("memory", "step")}

    def no_room(self, candidate: PlanCandidate) -> str:
        """Return the reason why a candidate does not fit the disk, or "" if it fits."""
        usage = self.disk(candidate)
        if sum(usage.values()) <= self.request.disk:
            return ""
        parts = ", ".join(f"{size / 1e6:,.0f} MB of {name}" for name, size in usage.items())
        return f"{NO_ROOM}: {parts}"

    def _plain_flops(self, steps: int) -> float:
        """Return the FLOPs per step without techniques."""
        _, bare = count(compose(self.plain, self.recipe.techniques, steps, self.device), ())
        return bare.flops
