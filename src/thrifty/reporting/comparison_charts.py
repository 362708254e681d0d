"""The charts of a comparison: differences of pairs, and losses over time; as SVG whose colours the page resolves."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from thrifty.reporting.chart_renderer import render_svg
from thrifty.reporting.color_theme import chart_look, css_variable

BASELINE = "baseline"
SERIES = ("control", "train", "held-out", "trained", "bad")
"""Colours of the palette, the baseline's first; more arms begin again, with dashes."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
Comparison = Mapping[str, Any]
"""What stands in comparison.json."""


def charts(data: Comparison) -> list[tuple[str, str, alt.LayerChart]]:
    """Title, words for who does not see it, and the chart."""
    done = [entry for entry in data["runs"] if "seed" in entry and entry["status"] == "finished"]
    return [chart for chart in [_differences(data, done), _curves(data, done)] if chart is not None]


def _differences(data: Comparison, done: Sequence[Mapping[str, Any]]) -> tuple[str, str, alt.LayerChart] | None:
    losses = {(entry["arm"], entry["seed"]): entry["held_out_loss"] for entry in done}
    pairs = [
        {"arm": label, "difference": loss - losses[BASELINE, seed]}
        for (label, seed), loss in losses.items()
        if label != BASELINE and (BASELINE, seed) in losses
    ]
    arms = data.get("outcome", {}).get("arms", {})
    differences = {label: arm["verdict"]["found"] for label, arm in arms.items() if arm.get("verdict", {}).get("found")}
    means = [{"arm": label, **one} for label, one in differences.items() if one["low"] is not None]
    if not pairs:
        return None
    y = alt.Y("arm:N", title=None, sort=None, axis=alt.Axis(labelLimit=320))
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(style="reference").encode(x="zero:Q")
    dots = alt.Chart(alt.Data(values=pairs)).mark_circle(size=45, color=css_variable("faint"), opacity=1)
    x = alt.X("difference:Q", title="held-out loss less the baseline's, pair by pair", axis=alt.Axis(tickCount=6))
    layers = [zero, dots.encode(x=x, y=y)]
    if means:
        base = alt.Chart(alt.Data(values=means)).encode(y=y)
        layers.append(base.mark_rule(strokeWidth=2.5, color=css_variable("train")).encode(x="low:Q", x2="high:Q"))
        layers.append(base.mark_tick(thickness=3, size=18, color=css_variable("train")).encode(x="mean:Q"))
    chart = alt.layer(*layers).properties(width=640, height=alt.Step(46))
    caption = "Dots are pairs; the bar is the interval of their mean. Left of the line an arm is better."
    return "Differences", caption, chart


def _curves(data: Comparison, done: Sequence[Mapping[str, Any]]) -> tuple[str, str, alt.LayerChart] | None:
    points = [
        {"arm": entry["arm"], "run": entry["run"], "seconds": seconds, "loss": loss}
        for entry in done
        for _, seconds, loss in entry["curve"]
        if loss is not None
    ]
    if not points:
        return None
    labels = [*data["definition"]["arms"]]
    colours = [css_variable(SERIES[index % len(SERIES)]) for index in range(len(labels))]
    dashes = [DASHES[index // len(SERIES) % len(DASHES)] for index in range(len(labels))]
    legend = alt.Legend(orient="top", title=None, labelLimit=0, columns=2)
    lines = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=1.4, clip=True).encode(
        x=alt.X("seconds:Q", title="seconds in training steps", axis=alt.Axis(tickCount=6)),
        y=alt.Y("loss:Q", title="held-out loss", scale=alt.Scale(zero=False, domainMax=_top(points))),
        color=alt.Color("arm:N", scale=alt.Scale(domain=labels, range=colours), legend=legend),
        strokeDash=alt.StrokeDash("arm:N", scale=alt.Scale(domain=labels, range=dashes), legend=None),
        detail="run:N",
    )  # fmt: skip
    return "Held-out loss over time", "A line for each run.", alt.layer(lines).properties(width=640, height=300)


def _top(points: Sequence[Mapping[str, Any]]) -> float:
    """Where the axis ends: the steep beginning would press all else flat."""
    losses = sorted(point["loss"] for point in points)
    return losses[int(0.9 * (len(losses) - 1))]


def svg(chart: alt.LayerChart) -> str:
    spec = {key: part for key, part in chart.to_dict().items() if key != "$schema"}
    look = chart_look(css_variable, font="sans-serif")  # known here and there, so that room is left for labels
    return render_svg({**spec, "background": None}, look)
