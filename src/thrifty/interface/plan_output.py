"""Plan on this machine as text and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from thrifty.reporting.number_format import duration, percent, scaled, significant
from thrifty.reporting.printed_result import open_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from thrifty.planning.choice_explanations import ChoiceReason
    from thrifty.planning.cost_estimates import Estimate
    from thrifty.planning.forecast import Forecast
    from thrifty.planning.forecast_ledger import PredictionRecord
    from thrifty.planning.planner import Plan


def plan_parts(plan: Plan) -> list[RenderableType]:
    """Return a plan as lines and tables."""
    misfits = [f"  {label}: {why}" for label, why in plan.misfits.items()]
    return [*format_plan(plan), "", _alternatives(plan), *misfits, "", choices_table(plan.reasons), ""]


def format_plan(plan: Plan) -> list[str]:
    """Return the changes and the forecast, one entry per line."""
    forecast = plan.forecast
    changes = ", ".join(option.label for option in plan.chosen.options) or "nothing: the recipe stays unchanged"
    name, share = forecast.memory_is
    most = f"largest part: {name}, {percent(share, 0)}"
    memory, step = _between(forecast.memory, _bytes), _between(forecast.step, duration)
    if plan.chosen.timing:
        of_each = " of a rank" if plan.chosen.ranks > 1 else ""
        tensors = f"{_bytes(forecast.counted)} of it in tensors"
        memory += f" at the peak{of_each}, {tensors}; {most}{_past(plan.past['memory'])}"
        part, of_time = forecast.time_is
        step += f"; {percent(of_time, 0)} of it {part}{_disturbed(forecast)}{_past(plan.past['step'])}"
    else:
        memory += f" in tensors at the peak; {most}"
        step += "; not measured: estimated from FLOPs and a fraction of this machine's peak"
    if forecast.process:
        whole = _bytes(forecast.process + forecast.memory.value)
        memory += f"; the process {whole}, with {_bytes(forecast.process)} in use before the model is built"
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
    return f"; measured while {took}: step times are upper bounds and are discarded"


def _past(record: PredictionRecord) -> str:
    if record.error is None:
        return "; no earlier run checked such forecasts"
    return f"; median error of such forecasts over {len(record.ratios)} earlier runs: {percent(record.error)}"


def _between(estimate: Estimate, show: Callable[[float], str]) -> str:
    if estimate.low == estimate.high:
        return show(estimate.value)
    return f"{show(estimate.value)} ({show(estimate.low)} to {show(estimate.high)})"


def _alternatives(plan: Plan) -> Table:
    rate = f"{plan.forecast.unit}/s"
    table = open_table("", "candidates, fastest first", "memory of the process", "step", rate, "time to the budget")
    for candidate, forecast in plan.alternatives:
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
    for reason in sorted(reasons, key=lambda reason: (reason.verdict == "not taken", reason.technique)):
        colour = colours.get(reason.verdict, "dim")
        table.add_row(reason.technique, f"[{colour}]{reason.verdict}[/{colour}]", escape(reason.why))
    return table


def _bytes(value: float) -> str:
    return scaled(value, "B")
