"""Plan on this machine as text and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from thrifty.core.errors import spelled
from thrifty.reporting.number_format import duration, percent, scaled, significant
from thrifty.reporting.printed_result import open_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from thrifty.planning.choice_explanations import ChoiceReason
    from thrifty.planning.cluster_plan import ClusterPlan
    from thrifty.planning.cost_estimates import Estimate
    from thrifty.planning.forecast import Forecast
    from thrifty.planning.forecast_ledger import PredictionRecord
    from thrifty.planning.plan_candidate import PlanCandidate
    from thrifty.planning.planner import Plan


NEAR = 4
"""Number of candidates that a plan prints by default, best first."""
NOT_TAKEN = "not taken"
NOTABLE = 0.01
"""Minimum size of other memory relative to the tensors to be printed."""


def plan_parts(plan: Plan, is_whole: bool) -> list[RenderableType]:
    """Return a plan as lines and tables. Unless `is_whole`, leave out slow candidates and techniques not taken."""
    near = plan.alternatives if is_whole else near_candidates(plan)
    return [*format_plan(plan), "", _alternatives(plan, near), *considered(plan, len(near), is_whole)]


def near_candidates(plan: Plan) -> list[tuple[PlanCandidate, Forecast]]:
    """Return the best candidates, and the chosen candidate if it is not among them."""
    best = plan.alternatives[:NEAR]
    return [*best, *(each for each in plan.alternatives[NEAR:] if each[0].options == plan.chosen.options)]


def considered(plan: Plan | ClusterPlan, near: int, is_whole: bool) -> list[RenderableType]:
    """Return the misfits and the choices of a plan, or the techniques in the plan and the number of the rest."""
    if is_whole:
        misfits = [f"  {label}: {why}" for label, why in plan.misfits.items()]
        return [*misfits, "", choices_table(plan.reasons), ""]
    taken = [reason for reason in plan.reasons if reason.verdict != NOT_TAKEN]
    candidates = len(plan.alternatives) + len(plan.misfits) - near
    rest = f"{candidates} more candidates and {len(plan.reasons) - len(taken)} techniques not taken"
    return ["", choices_table(taken), "", f"{rest}: {spelled('--all', 'print(plan.everything())')}", ""]


def format_plan(plan: Plan) -> list[str]:
    """Return the changes and the forecast, one entry per line."""
    forecast = plan.forecast
    changes = ", ".join(option.label for option in plan.chosen.options) or "nothing: the recipe stays unchanged"
    name, share = forecast.memory_is
    most = f"largest part of the tensors: {name}, {percent(share, 0)}"
    memory, step = _between(forecast.peak, _bytes), _between(forecast.step, duration)
    memory += " at the peak" + (" of a rank" if plan.chosen.ranks > 1 else "")
    rest = forecast.memory.value - forecast.counted
    places = {
        "of the process before the model is built": forecast.process,
        "of tensors": forecast.counted,
        "of kernels and freed blocks": rest if rest > NOTABLE * forecast.counted else 0.0,
    }
    memory += f": {', '.join(f'{_bytes(size)} {place}' for place, size in places.items() if size)}; {most}"
    if plan.chosen.timing:
        memory += _past(plan.past["memory"])
        part, of_time = forecast.time_is
        step += f"; {percent(of_time, 0)} of it {part}{_disturbed(forecast)}{_past(plan.past['step'])}"
    else:
        step += "; not measured: estimated from FLOPs and a fraction of this machine's peak"
    lines = [
        f"change   {changes}",
        f"memory   {memory}",
        f"step     {step}",
        f"rate     {_between(forecast.tokens_per_second, lambda rate: scaled(rate, f'{forecast.unit}/s'))}",
        f"budget   {_between(forecast.seconds, duration)} for {_between(forecast.steps, '{:,.0f}'.format)} steps, "
        f"{scaled(forecast.tokens.value)} {forecast.unit}",
    ]
    disk = ", ".join(f"{_bytes(size)} of {name}" for name, size in forecast.disk.items())
    lines.append(f"disk     {_bytes(sum(forecast.disk.values()))} at most: {disk}")
    if plan.stopped:
        lines.append(f"planning {plan.stopped}")
    if forecast.cost is not None:
        lines.append(f"cost     {_between(forecast.cost, significant)}")
    return lines


def _disturbed(forecast: Forecast) -> str:
    if not forecast.others:
        return ""
    took = f"other processes used {forecast.others:.1f} of {forecast.cores} cores"
    return f"; measured while {took}: step times are upper bounds, and the next plan measures them again"


def _past(record: PredictionRecord) -> str:
    if record.error is None:
        return "; no finished run of this machine to compare with"
    return f"; median error of such forecasts over {len(record.ratios)} earlier runs: {percent(record.error)}"


def _between(estimate: Estimate, show: Callable[[float], str]) -> str:
    if estimate.low == estimate.high:
        return show(estimate.value)
    return f"{show(estimate.value)} ({show(estimate.low)} to {show(estimate.high)})"


def _alternatives(plan: Plan, near: Sequence[tuple[PlanCandidate, Forecast]]) -> Table:
    rate = f"{plan.forecast.unit}/s"
    table = open_table("", "candidates, best first", "memory", "step", rate, "time to the budget")
    for candidate, forecast in near:
        mark = "→" if candidate.options == plan.chosen.options else ""
        step, seconds = duration(forecast.step.value), duration(forecast.seconds.value)
        rate = scaled(forecast.tokens_per_second.value)
        memory = _bytes(forecast.process + forecast.memory.value)
        table.add_row(mark, escape(candidate.label), memory, step, rate, seconds)
    return table


def choices_table(reasons: Sequence[ChoiceReason]) -> Table:
    """Return a table of all techniques with verdict and reason. Rejected techniques come last."""
    colours = {"kept": "green", "added": "bold green", "changed": "bold green", "taken out": "yellow"}
    table = open_table("technique", "verdict", "why")
    for reason in sorted(reasons, key=lambda reason: (reason.verdict == NOT_TAKEN, reason.technique)):
        colour = colours.get(reason.verdict, "dim")
        table.add_row(reason.technique, f"[{colour}]{reason.verdict}[/{colour}]", escape(reason.why))
    return table


def _bytes(value: float) -> str:
    return scaled(value, "B")
