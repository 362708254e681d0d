"""Page of a plan: the choice and its reasons, memory against the limit, near candidates, and everything considered."""

from __future__ import annotations

from functools import partial
from math import isinf
from typing import TYPE_CHECKING

import altair as alt

from thrifty.interface.plan_output import NOT_TAKEN, format_plan, near_candidates
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.number_format import duration, scaled
from thrifty.reporting.result_page import GOOD, PageVerdict, ResultPage, RowLabels, page_chart
from thrifty.reporting.run_tables import COMPONENTS, TextTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thrifty.planning.forecast import Forecast
    from thrifty.planning.plan_candidate import PlanCandidate
    from thrifty.planning.planner import Plan

    Candidates = Sequence[tuple[PlanCandidate, Forecast]]

SHOWN = ("memory", "step", "budget")
"""Lines of the forecast that the page shows below the choice."""
FAR = 3.0
"""Ratio of the memory limit to the largest bar above which the limit is only named, because bars would be short."""


def plan_page(plan: Plan) -> str:
    """Return the page of a plan on this machine."""
    forecast = [(word, text) for word, _, text in (line.partition(" ") for line in format_plan(plan))]
    near = near_candidates(plan)
    peak = plan.forecast.process + plan.forecast.memory.value
    limit = "" if isinf(plan.limit) else f"The limit is {scaled(plan.limit, 'B')}. "
    parts = f"{limit}Gradients exist only after the activations are freed, so the peak is below the sum of the parts."
    texts = {"Recipe with these changes": write_recipe(plan.recipe)} if plan.recipe.object_options is not None else {}
    reasons = [(each.technique, each.verdict, each.why) for each in plan.reasons]
    return ResultPage(
        kind="plan",
        name=plan.recipe.name,
        status="",
        about=f"Techniques for {scaled(peak, 'B')} of {scaled(plan.limit, 'B')} of memory." if limit else "",
        verdicts=[PageVerdict(_headline(plan), tone=GOOD)],
        statements=[
            *(("", word.capitalize(), text.strip()) for word, text in forecast if word in SHOWN),
            *(("", f"{each.technique} {each.verdict}", each.why) for each in plan.reasons if each.verdict != NOT_TAKEN),
        ],
        cautions=[plan.stopped] if plan.stopped else [],
        charts=[
            page_chart("Predicted memory", parts, partial(_memory_chart, plan), is_whole=False),
            page_chart(
                "Seconds per step of the near candidates",
                "Bars are 90 % intervals. The plan is highlighted.",
                partial(_step_chart, plan, near),
                is_whole=False,
            ),
        ],
        tables=[_candidates("Near candidates, fastest first", plan, near)],
        folded=[
            _candidates(f"All {len(plan.alternatives)} candidates that fit", plan, plan.alternatives),
            TextTable("Candidates that do not fit", ("Candidate", "Reason"), list(plan.misfits.items())),
            TextTable("All techniques", ("Technique", "Verdict", "Reason"), sorted(reasons, key=_not_taken_last)),
            TextTable("Forecast", ("Quantity", "Prediction"), [(word, text.strip()) for word, text in forecast]),
        ],
        texts=texts,
        source="Memory is counted on fake tensors; step times are measured in probes, unless the page says otherwise.",
    ).render()


def _headline(plan: Plan) -> str:
    changes = ", ".join(option.label for option in plan.chosen.options)
    return f"Change: {changes}" if changes else "Keep the recipe unchanged: no candidate that fits is faster"


def _not_taken_last(reason: tuple[str, str, str]) -> tuple[bool, str]:
    return reason[1] == NOT_TAKEN, reason[0]


def _candidates(title: str, plan: Plan, candidates: Candidates) -> TextTable:
    rows = [
        (
            f"→ {candidate.label}" if candidate.options == plan.chosen.options else candidate.label,
            scaled(forecast.process + forecast.memory.value, "B"),
            duration(forecast.step.value),
            scaled(forecast.tokens_per_second.value),
            duration(forecast.seconds.value),
        )
        for candidate, forecast in candidates
    ]
    columns = ("Candidate", "Memory", "Step", f"{plan.forecast.unit}/s", "Time to the budget")
    return TextTable(title, columns, rows, frozenset(range(1, len(columns))))


def _memory_chart(plan: Plan, width: int) -> alt.LayerChart:
    """Return a bar for each part of the predicted memory and for the peak, with the limit as a line."""
    forecast, footprint = plan.forecast, plan.chosen.footprint
    peak = forecast.memory.plus(forecast.process)
    sizes = {"process before the model": forecast.process} if forecast.process else {}
    sizes |= {part: getattr(footprint, part) for part in COMPONENTS if getattr(footprint, part)}
    labels = RowLabels([*sizes, "peak"], width - 60)
    rows = [{"part": labels.wrap(part), "bytes": size, "text": scaled(size, "B")} for part, size in sizes.items()]
    rows.append({"part": "peak", "bytes": peak.value, "text": scaled(peak.value, "B"), "is_peak": True})
    for row in rows:
        row["end"] = peak.high if "is_peak" in row else row["bytes"]
    y = alt.Y("part:N", title=None, sort=None, axis=labels.axis())
    base = alt.Chart(alt.Data(values=rows)).encode(y=y)
    highlight = alt.condition("datum.is_peak", alt.value(css_variable("train")), alt.value(css_variable("faint")))
    bars = base.mark_bar(height={"band": 0.6}).encode(x=alt.X("bytes:Q", axis=None), color=highlight)
    texts = base.mark_text(align="left", dx=5, color=css_variable("ink"), fontSize=12)
    layers: list[alt.Chart] = [bars, texts.encode(x=alt.X("end:Q", axis=None), text="text:N")]
    ends = alt.Chart(alt.Data(values=[{"part": "peak", "low": peak.low, "high": peak.high}]))
    layers.append(
        ends.mark_rule(strokeWidth=2, color=css_variable("ink")).encode(x=alt.X("low:Q", axis=None), x2="high:Q", y=y)
    )
    if plan.limit < FAR * max(row["end"] for row in rows):
        line = alt.Chart(alt.Data(values=[{"limit": plan.limit}]))
        layers.append(
            line.mark_rule(style="reference", color=css_variable("bad")).encode(x=alt.X("limit:Q", axis=None))
        )
    return alt.layer(*layers).properties(**labels.size())


def _step_chart(plan: Plan, near: Candidates, width: int) -> alt.LayerChart:
    labels = RowLabels([candidate.label for candidate, _ in near], width)
    rows = [
        {
            "candidate": labels.wrap(candidate.label),
            "plan": candidate.options == plan.chosen.options,
            **forecast.step.as_dict(),
        }
        for candidate, forecast in near
    ]
    y = alt.Y("candidate:N", title=None, sort=None, axis=labels.axis())
    colour = alt.condition("datum.plan", alt.value(css_variable("train")), alt.value(css_variable("control")))
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, color=colour)
    x = alt.X("low:Q", title="seconds per step", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=4))
    rules = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q")
    dots = base.mark_circle(size=70, opacity=1).encode(x=alt.X("value:Q", title="seconds per step"))
    return alt.layer(rules, dots).properties(**labels.size())
