"""Charts of plans: parts of the predicted memory, and seconds per step of candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import altair as alt

from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.number_format import scaled
from thrifty.reporting.result_page import RowLabels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thrifty.planning.cost_estimates import Estimate

FAR = 3.0
"""Ratio of the memory limit to the largest bar above which the limit has no line, because bars would be short."""


def memory_chart(parts: Mapping[str, float], peak: Estimate, limit: float, width: int) -> alt.LayerChart:
    """Return a bar for each part of the memory and for the peak, with the limit as a line."""
    labels = RowLabels([*parts, "peak"], width - 60)
    rows = [{"part": labels.wrap(part), "bytes": size, "text": scaled(size, "B")} for part, size in parts.items()]
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
    if limit < FAR * max(row["end"] for row in rows):
        line = alt.Chart(alt.Data(values=[{"limit": limit}]))
        layers.append(
            line.mark_rule(style="reference", color=css_variable("bad")).encode(x=alt.X("limit:Q", axis=None))
        )
    return alt.layer(*layers).properties(**labels.size())


def step_chart(seconds: Mapping[str, Estimate], chosen: str, width: int) -> alt.LayerChart:
    """Return the seconds per step of candidates as dots with intervals. The `chosen` candidate is highlighted."""
    labels = RowLabels([*seconds], width)
    rows = [
        {"candidate": labels.wrap(label), "plan": label == chosen, **step.as_dict()} for label, step in seconds.items()
    ]
    y = alt.Y("candidate:N", title=None, sort=None, axis=labels.axis())
    colour = alt.condition("datum.plan", alt.value(css_variable("train")), alt.value(css_variable("control")))
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, color=colour)
    x = alt.X("low:Q", title="seconds per step", scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=4))
    rules = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q")
    dots = base.mark_circle(size=70, opacity=1).encode(x=alt.X("value:Q", title="seconds per step"))
    return alt.layer(rules, dots).properties(**labels.size())
