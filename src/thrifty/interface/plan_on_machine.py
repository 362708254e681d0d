"""Planning on this machine: open the data of a recipe, and run candidates in separate processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from thrifty.core.errors import UsageError
from thrifty.interface.progress import progress

if TYPE_CHECKING:
    import torch

    from thrifty.core.recipe import Recipe
    from thrifty.core.technique import Numerics
    from thrifty.planning.candidate_trials import TimeOf
    from thrifty.planning.forecast import PlanRequest
    from thrifty.planning.plan_candidate import PlanCandidate
    from thrifty.planning.planner import Plan
    from thrifty.training.run_setup import PreparedRun

UTILISATION = 0.4
"""Fraction of a device's peak FLOP/s that steps without a probe are assumed to reach."""


def plan_on_machine(
    recipe: Recipe,
    wanted: PlanRequest,
    probe: bool = True,
    probe_seconds: float = 20.0,
    probed_candidates: int = 4,
    seconds: float | None = None,
    ranks: int = 1,
    quiet: bool = False,
) -> Plan:
    """Plan a recipe on this machine for a number of ranks.

    Planning takes at most `seconds`. By default, no probe starts after a fifth of the run, or after a minute if that is
    longer. Raises InfeasibleError if no candidate fits.
    """
    import time
    from importlib import import_module
    from math import isinf

    from thrifty import techniques
    from thrifty.core.technique import Numerics
    from thrifty.experiments.past_results import past_comparisons
    from thrifty.interface.plan_evidence import evidence_lines, proven_gains
    from thrifty.machine.machine_info import free_memory, peak_flops
    from thrifty.planning.forecast_ledger import entries
    from thrifty.planning.planner import STEPS, Planner
    from thrifty.planning.rank_options import without_rank_techniques
    from thrifty.recipes.recipe_toml import recipe_to_data
    from thrifty.recipes.short_budgets import without_slow_start
    from thrifty.training.memory_meter import MemoryMeter, kept_bytes
    from thrifty.training.rank_setup import choose_device
    from thrifty.training.run_ledger import record_forecast
    from thrifty.training.run_setup import prepare_run
    from thrifty.training.sent_objects import can_be_sent, refuse_start_during_import

    began = time.monotonic()
    if probe:
        refuse_start_during_import()
    if recipe.mesh.least_ranks > 1:
        raise UsageError(
            "the recipe has a mesh, but planning chooses the mesh",
            fix=f"remove the mesh; then --ranks {recipe.mesh.least_ranks}, or --cluster NAME for another machine",
        )
    if ranks > 1:
        _refuse_ranks(ranks, choose_device(recipe.device), wanted.allow)
        recipe = replace(recipe, techniques=without_rank_techniques(recipe.techniques))
    recipe = without_slow_start(recipe, progress(quiet, "planning: "))  # as the run does
    probe = probe and can_be_sent(recipe.objects)
    prepared = prepare_run(recipe, steps=recipe.budget.steps or STEPS, quiet=quiet)
    run = prepared.run
    shared = isinf(wanted.memory) and run.device.type == "cpu"
    free = free_memory(run.device)
    if isinf(wanted.memory):
        wanted = replace(wanted, memory=free)
    known = {*techniques.own_names(), *(technique.name for technique in recipe.techniques)}
    catalogue = {name: techniques.find(name) for name in sorted(known)}
    import_module("torch._dynamo")  # a run imports it before it builds the model

    def kept(candidate: PlanCandidate) -> float:
        activations = candidate.footprint.activations if candidate.footprint else 0.0
        return kept_bytes(run.device, candidate.techniques, activations)

    ending = None if seconds is None else began + seconds
    plan = Planner(
        recipe=prepared.recipe_in_steps,
        plain=run.plain,
        catalogue=catalogue,
        request=wanted,
        device=run.device,
        tokens=prepared.data.example_unit,
        unit=prepared.unit,
        data=_prepared_bytes(prepared),
        rate=UTILISATION * peak_flops(run.device, _number_format(recipe)),
        time=_probing(prepared, probe_seconds, wanted.allow is Numerics.EXACT, ending) if probe else None,
        ledger=entries(run.device.type),
        outside=sorted({*techniques.names()} - known),
        evidence=evidence_lines(catalogue),
        gains=proven_gains(past_comparisons(), recipe, catalogue) if wanted.allow is Numerics.DIFFERENT else (),
        say=progress(quiet, "planning: "),
        finalists=probed_candidates,
        ranks=ranks,
        shared=shared,
        process=MemoryMeter(run.device).process,
        kept=kept,
        free=free,
        seconds=seconds,
        began=began,
        loading=max(began - prepared.began, 0.0),
    ).plan()
    record_forecast(recipe_to_data(plan.recipe), _expected(plan))
    return plan


def _number_format(recipe: Recipe) -> torch.dtype:
    """Return the number format of most of a recipe's matrix products."""
    import torch

    names = {technique.name for technique in recipe.techniques}
    return torch.bfloat16 if names & {"precision.mixed", "precision.bfloat16_weights"} else torch.float32


def _refuse_ranks(ranks: int, device: torch.device, allow: Numerics) -> None:
    """Raise UsageError if there are more ranks than GPUs, or if several ranks are planned with --allow exact."""
    import torch

    from thrifty.core.technique import Numerics

    there = torch.cuda.device_count()
    if device.type == "cuda" and ranks > there:
        raise UsageError(
            f"--ranks {ranks} is more than the {there} GPUs of this machine", fix=f"--ranks {there}; or --cluster NAME"
        )
    if allow is Numerics.EXACT:
        raise UsageError(
            "--allow exact forbids several ranks, because they sum in a different order than one rank",
            fix="--allow rounding",
        )


def _expected(plan: Plan) -> dict[str, float]:
    """Return the predictions to compare with a later run. Disturbed step times are left out."""
    timing, forecast = plan.chosen.timing, plan.forecast
    if timing is None:
        return {}
    memory = {"memory": forecast.memory.value}
    return memory if timing.is_disturbed else memory | {"step": forecast.step.value}


def _prepared_bytes(prepared: PreparedRun) -> float:
    tokens = getattr(getattr(prepared.run.plain.source, "windows", None), "tokens", None)
    file = getattr(tokens, "filename", None)
    return float(sum(path.stat().st_size for path in Path(file).parent.iterdir())) if file else 0.0


def _probing(prepared: PreparedRun, seconds: float, fixed: bool, ending: float | None) -> TimeOf:
    """Return a function that times candidates in separate processes. Results are cached per machine.

    `fixed` is True if no candidate changes the micro-batches. Probes end before the monotonic time `ending`, if given.
    """
    import time as clock

    from thrifty.core.claims import Claim
    from thrifty.planning.cost_estimates import StepTiming
    from thrifty.planning.probe_jobs import ENDING, LONGEST, ProbeJob, cache_probe, probe_in_process, sizes
    from thrifty.recipes.recipe_toml import recipe_to_data

    def limit() -> float:
        return LONGEST if ending is None else min(LONGEST, ending - clock.monotonic() - ENDING)

    started = probe_in_process("thrifty.interface.probe_process", limit, prepared.recipe.objects)
    probe = cache_probe(started, prepared.run.device.type)
    joint = prepared.run.plain.objective.joint

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        uncut = joint or candidate.ranks > 1  # one micro-batch does not determine the time of the whole step
        techniques = tuple(t for t in candidate.techniques if uncut or Claim.MICRO_BATCHES not in t.claims)
        tables = recipe_to_data(replace(prepared.recipe, techniques=techniques, mesh=candidate.mesh))
        batch, compiled = candidate.batch, candidate.is_compiled
        rows = (batch,) if uncut else sizes(batch, candidate.parts, compiled, fixed)
        parts = 1 if uncut else candidate.parts
        assert candidate.footprint is not None
        counted = (candidate.footprint.memory, candidate.footprint.flops)
        return probe(ProbeJob(tables, prepared.run.steps, rows, parts, seconds, counted, bar))

    return time
