"""Charts of a comparison as SVG with CSS colors: paired differences, and losses over time."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from thrifty.reporting.chart_renderer import render_svg
from thrifty.reporting.color_theme import chart_look, css_variable

BASELINE = "baseline"
SERIES = ("control", "train", "held-out", "trained", "bad")
"""Palette colors. The first color is the baseline's. Variants after the last color repeat colors with dashed lines."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
Comparison = Mapping[str, Any]
"""Content of comparison.json."""


def charts(data: Comparison) -> list[tuple[str, str, alt.LayerChart]]:
    """Return the title, text alternative and chart of each figure."""
    done = [entry for entry in data["runs"] if "seed" in entry and entry["status"] == "finished"]
    return [chart for chart in [_differences(data, done), _curves(data, done)] if chart is not None]


def judged_of(data: Comparison) -> str:
    """Return the name of the held-out metric that the verdict uses, such as "loss"."""
    return data["definition"]["arms"][BASELINE].get("evaluation", {}).get("judge", "loss")


def judged_value(measured: Mapping[str, Any], judged: str) -> float | None:
    """Return the value of the metric `judged` from a run, or from the means of a variant."""
    return measured["held_out_loss"] if judged == "loss" else measured["measured"].get(judged)


def found_difference(data: Comparison, label: str) -> Mapping[str, float | None] | None:
    """Return a variant's mean difference from the baseline, with the ends "low" and "high" of its interval; None if it
    was not measured.
    """
    found = data["outcome"]["arms"][label].get("verdict", {}).get("found")
    if found is None or _is_lower_better(data):
        return found
    ends = {"low": found["high"], "high": found["low"]}  # a verdict negates the metric if higher is better
    return {name: value and -value for name, value in {"mean": found["mean"], **ends}.items()}


def _is_lower_better(data: Comparison) -> bool:
    lower = data["definition"]["arms"][BASELINE].get("evaluation", {}).get("lower_is_better")
    return judged_of(data) == "loss" if lower is None else lower


def _differences(data: Comparison, done: Sequence[Mapping[str, Any]]) -> tuple[str, str, alt.LayerChart] | None:
    judged = judged_of(data)
    values = {(entry["arm"], entry["seed"]): judged_value(entry, judged) for entry in done}
    losses = {place: value for place, value in values.items() if value is not None}
    pairs = [
        {"arm": label, "difference": loss - losses[BASELINE, seed]}
        for (label, seed), loss in losses.items()
        if label != BASELINE and (BASELINE, seed) in losses
    ]
    differences = {label: found_difference(data, label) for label in data.get("outcome", {}).get("arms", {})}
    means = [{"arm": label, **one} for label, one in differences.items() if one and one["low"] is not None]
    if not pairs:
        return None
    y = alt.Y("arm:N", title=None, sort=None, axis=alt.Axis(labelLimit=320))
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(style="reference").encode(x="zero:Q")
    dots = alt.Chart(alt.Data(values=pairs)).mark_circle(size=45, color=css_variable("faint"), opacity=1)
    x = alt.X("difference:Q", title=f"held-out {judged} minus baseline, per pair", axis=alt.Axis(tickCount=6))
    layers = [zero, dots.encode(x=x, y=y)]
    if means:
        base = alt.Chart(alt.Data(values=means)).encode(y=y)
        layers.append(base.mark_rule(strokeWidth=2.5, color=css_variable("train")).encode(x="low:Q", x2="high:Q"))
        layers.append(base.mark_tick(thickness=3, size=18, color=css_variable("train")).encode(x="mean:Q"))
    chart = alt.layer(*layers).properties(width=640, height=alt.Step(46))
    better = "Left" if _is_lower_better(data) else "Right"
    caption = f"Dots are pairs; the bar is the interval of their mean. {better} of the line, a variant is better."
    return "Differences", caption, chart


def _curves(data: Comparison, done: Sequence[Mapping[str, Any]]) -> tuple[str, str, alt.LayerChart] | None:
    judged = judged_of(data)
    curve = "curve" if judged == "loss" else "judged_curve"
    points = [
        {"arm": entry["arm"], "run": entry["run"], "seconds": seconds, "loss": value}
        for entry in done
        for _, seconds, value in entry.get(curve, ())
        if value is not None
    ]
    if not points:
        return None
    labels = [*data["definition"]["arms"]]
    colours = [css_variable(SERIES[index % len(SERIES)]) for index in range(len(labels))]
    dashes = [DASHES[index // len(SERIES) % len(DASHES)] for index in range(len(labels))]
    legend = alt.Legend(orient="top", title=None, labelLimit=0, columns=2)
    lines = alt.Chart(alt.Data(values=points)).mark_line(strokeWidth=1.4, clip=True).encode(
        x=alt.X("seconds:Q", title="seconds in training steps", axis=alt.Axis(tickCount=6)),
        y=alt.Y("loss:Q", title=f"held-out {judged}", scale=_scale(points, judged)),
        color=alt.Color("arm:N", scale=alt.Scale(domain=labels, range=colours), legend=legend),
        strokeDash=alt.StrokeDash("arm:N", scale=alt.Scale(domain=labels, range=dashes), legend=None),
        detail="run:N",
    )  # fmt: skip
    return f"Held-out {judged} over time", "One line per run.", alt.layer(lines).properties(width=640, height=300)


def _scale(points: Sequence[Mapping[str, Any]], judged: str) -> alt.Scale:
    """Return a y scale. For a loss, the scale cuts off the steep beginning of the curve."""
    losses = sorted(point["loss"] for point in points)
    most = {"domainMax": losses[int(0.9 * (len(losses) - 1))]} if judged == "loss" else {}
    return alt.Scale(zero=False, **most)


def svg(chart: alt.LayerChart) -> str:
    spec = {key: part for key, part in chart.to_dict().items() if key != "$schema"}
    look = chart_look(css_variable, font="sans-serif")  # a font that renderer and browser both have, so that labels fit
    return render_svg({**spec, "background": None}, look)
