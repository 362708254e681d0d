"""A small recipe to plan for, with counts and times by formulas instead of traces and processes."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiny_runs import plain_run

from thrifty import techniques
from thrifty.composition.compose import Run
from thrifty.core.footprint import Footprint
from thrifty.core.recipe import DataSettings, Recipe
from thrifty.core.technique import Numerics, Technique
from thrifty.planning import candidate_trials
from thrifty.planning.cost_estimates import StepTiming
from thrifty.planning.forecast import PlanRequest
from thrifty.planning.forecast_ledger import PredictionRecord
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import PlanSearch
from thrifty.planning.planner import Planner, allowed_options

BATCH, MB = 8, 1e6
CATALOGUE = {name: techniques.find(name) for name in techniques.own_names()}


def plain_techniques() -> tuple[Technique, ...]:
    return (CATALOGUE["optimizers.adamw"](), CATALOGUE["schedules.linear"]())


def recipe(*chosen: Technique, **sections: Any) -> Recipe:
    sections = {"data": DataSettings(length=16, batch=BATCH)} | sections
    return Recipe(name="tiny", techniques=(*plain_techniques(), *chosen), **sections)


def formula(run: Run) -> Footprint:
    """Return an approximate footprint, in which techniques change memory and work as they promise."""
    held = {technique.name: technique for technique in run.techniques}
    activations, flops, optimizer = 800.0, 100.0, 80.0
    if again := held.get("memory.recompute"):
        activations *= 0.5 if getattr(again, "every", 1) == 2 else 0.2
        flops *= 1.15 if getattr(again, "every", 1) == 2 else 1.3
    if budget := held.get("memory.optimal_recompute"):
        activations *= budget.bytes  # type: ignore[attr-defined]
        flops *= 1.4 - 0.4 * budget.bytes  # type: ignore[attr-defined]
    if codes := held.get("memory.compress_activations"):
        activations *= codes.bits / 30  # type: ignore[attr-defined]
    if "precision.mixed" in held:
        activations *= 0.6
    if "memory.offload_activations" in held:
        activations *= 0.3
    if parts := held.get("large_batch.gradient_accumulation"):
        activations /= parts.micro_batches  # type: ignore[attr-defined]
    if state := held.get("precision.optimizer_state"):
        optimizer *= 0.25 if state.format == "int8" else 0.5  # type: ignore[attr-defined]
    if "memory.offload_optimizer" in held:
        optimizer = 0.0
    sizes = {"parameters": 40, "gradients": 40, "optimizer": optimizer, "activations": activations, "temporary": 30}
    return Footprint(**{name: size * MB for name, size in sizes.items()}, flops=flops)


def searching(
    memory: float, allow: Numerics = Numerics.ROUNDING, base: Sequence[Technique] = (), ranks: int = 1, **how: Any
) -> PlanSearch:
    """Return a search over the tiny recipe for `memory` MB, with counts by the formula."""
    plain, planned = plain_run(batch=BATCH), recipe(*base)
    options, others = allowed_options(planned, plain, CATALOGUE, allow, "cpu", ranks)
    how = {"count": formula, "wider": {each.numerics for axis in others.values() for each in axis}} | how
    return PlanSearch(plain, planned.techniques, 100, options, memory * MB, **how)


def by_expectation(candidate: PlanCandidate, bar: float = math.inf) -> StepTiming:
    """Return the expected timing of a candidate, without memory beyond the tensors."""
    rows = -(-candidate.batch // candidate.parts)
    assert candidate.footprint is not None
    seconds = candidate.relative * rows / candidate.batch
    return StepTiming((rows,), (seconds,), (seconds,), 0.0, 0.0, 0.0, 0.0, 0.0, candidate.footprint.memory)


def on_a_clock(monkeypatch: pytest.MonkeyPatch, probe: Callable[[PlanCandidate], float]) -> tuple[list[float], dict]:
    """Return a clock of planning, in seconds, and arguments of a search whose counts take 1 s and whose probes take
    `probe(candidate)` seconds."""
    seconds = [0.0]
    monkeypatch.setattr(candidate_trials, "monotonic", lambda: seconds[0])

    def counted(run: Run) -> Footprint:
        seconds[0] += 1.0
        return formula(run)

    def timed(candidate: PlanCandidate, bar: float) -> StepTiming:
        seconds[0] += probe(candidate)
        return by_expectation(candidate)

    return seconds, {"count": counted, "time": timed}


TIMING = StepTiming((BATCH,), (1.0,), (1.0,), 0.25, 0.0, 5.0, 10.0, 2.0, 300.0)
NONE = {"memory": PredictionRecord(()), "step": PredictionRecord(())}
PLANNER = Planner(
    recipe=recipe(),
    plain=plain_run(batch=BATCH),
    catalogue=CATALOGUE,
    request=PlanRequest(),
    device=torch.device("cpu"),
    tokens=16,
    rate=100.0,
)


def candidate(timing: StepTiming | None, *names: str) -> PlanCandidate:
    techniques = tuple(CATALOGUE[name]() for name in names)
    return PlanCandidate((), techniques, BATCH, footprint=Footprint(activations=200.0, flops=125.0), timing=timing)
