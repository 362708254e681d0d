"""Charts of a comparison as SVG with CSS colors: losses over the used budget, and paired differences."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.result_page import PHONE, WIDE

BASELINE = "baseline"
SERIES = ("control", "train", "held-out", "trained", "bad")
"""Palette colors. The first color is the baseline's. Variants after the last color repeat colors with dashed lines."""
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2])
PAPER = 640
"""Width in pixels of the plot in a file."""
USED = {"time": "seconds in training steps", "steps": "steps", "tokens": "tokens", "flops": "FLOPs"}
"""Title of the x axis of curves, by the budget that is equal for all variants."""
INTERPOLATED = 64
"""Number of points of a mean curve of runs that are measured at different amounts."""
LEAST_PAIRS = 6
"""Number of pairs from which an interval is not the range of the pairs."""
CONFIDENCE = 0.95
"""Confidence of the interval of a single variant, for comparisons without a verdict."""
BEGINNING = 0.15
"""Fraction of the time axis whose higher losses are cut off."""
Comparison = Mapping[str, Any]
"""Content of comparison.json."""


def charts(data: Comparison, width: int = WIDE) -> list[tuple[str, str, alt.LayerChart]]:
    """Return the title, text alternative and chart of each figure. `width` is the width of the plot in pixels."""
    done = [entry for entry in data["runs"] if "seed" in entry and entry["status"] == "finished"]
    return [chart for chart in [_curves(data, done, width), _differences(data, done, width)] if chart is not None]


def named_charts(data: Comparison, width: int) -> dict[str, alt.LayerChart]:
    """Return the charts by name: the judged metric over the equal budget, such as "loss", and "differences"."""
    return {title.split()[-3 if " over " in title else 0].lower(): chart for title, _, chart in charts(data, width)}


def judged_of(data: Comparison) -> str:
    """Return the name of the held-out metric that the verdict uses, such as "loss"."""
    return data["definition"]["variants"][BASELINE].get("evaluation", {}).get("judge", "loss")


def judged_value(measured: Mapping[str, Any], judged: str) -> float | None:
    """Return the value of the metric `judged` from a run, or from the means of a variant."""
    return measured["held_out_loss"] if judged == "loss" else measured["measured"].get(judged)


def found_difference(data: Comparison, label: str) -> Mapping[str, float | None] | None:
    """Return a variant's mean difference from the baseline, with the ends "low" and "high" of its interval; None if it
    was not measured.
    """
    found = data["outcome"]["variants"][label].get("verdict", {}).get("found")
    if found is None or _is_lower_better(data):
        return found
    ends = {"low": found["high"], "high": found["low"]}  # a verdict negates the metric if higher is better
    return {name: value and -value for name, value in {"mean": found["mean"], **ends}.items()}


def interval_in_words(data: Comparison) -> str:
    """Return the meaning of the ends of the interval of a difference. The confidence is corrected for the number of
    variants."""
    if data["definition"]["protocol"]["seeds"] < LEAST_PAIRS:
        return "range of pairs"
    variants = data.get("outcome", {}).get("variants", {}).values()
    confidence = next((each["verdict"]["confidence"] for each in variants if "verdict" in each), CONFIDENCE)
    return f"{100 * confidence:.3g} %"


def _is_lower_better(data: Comparison) -> bool:
    lower = data["definition"]["variants"][BASELINE].get("evaluation", {}).get("lower_is_better")
    return judged_of(data) == "loss" if lower is None else lower


def _differences(
    data: Comparison, done: Sequence[Mapping[str, Any]], width: int
) -> tuple[str, str, alt.LayerChart] | None:
    judged = judged_of(data)
    values = {(entry["variant"], entry["seed"]): judged_value(entry, judged) for entry in done}
    losses = {place: value for place, value in values.items() if value is not None}
    pairs = [
        {"variant": label, "difference": loss - losses[BASELINE, seed]}
        for (label, seed), loss in losses.items()
        if label != BASELINE and (BASELINE, seed) in losses
    ]
    differences = {label: found_difference(data, label) for label in data.get("outcome", {}).get("variants", {})}
    means = [{"variant": label, **one} for label, one in differences.items() if one and one["low"] is not None]
    if not pairs:
        return None
    y = alt.Y("variant:N", title=None, sort=None, axis=alt.Axis(labelLimit=width // 3))
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(style="reference").encode(x="zero:Q")
    dots = alt.Chart(alt.Data(values=pairs)).mark_circle(size=45, color=css_variable("faint"), opacity=1)
    x = alt.X("difference:Q", title=f"held-out {judged} minus baseline, per pair", axis=alt.Axis(tickCount=6))
    layers = [zero, dots.encode(x=x, y=y)]
    if means:
        base = alt.Chart(alt.Data(values=means)).encode(y=y)
        layers.append(base.mark_rule(strokeWidth=2.5, color=css_variable("train")).encode(x="low:Q", x2="high:Q"))
        layers.append(base.mark_tick(thickness=3, size=18, color=css_variable("train")).encode(x="mean:Q"))
    chart = alt.layer(*layers).properties(width=width, height=alt.Step(46))
    better = "Left" if _is_lower_better(data) else "Right"
    caption = (
        f"Dots are pairs; the bar is their mean ({interval_in_words(data)}). {better} of the line, a variant is better."
    )
    return "Differences", caption, chart


def _curves(data: Comparison, done: Sequence[Mapping[str, Any]], width: int) -> tuple[str, str, alt.LayerChart] | None:
    """Return one line per variant, the mean over seeds, in a band from the lowest to the highest seed."""
    judged = judged_of(data)
    equal = data["definition"]["protocol"]["equal"]
    measured: dict[str, list[np.ndarray]] = defaultdict(list)
    for entry in done:
        per_step = {"tokens": entry["tokens"] / entry["steps"], "flops": (entry["flops"] or 0.0) / entry["steps"]}
        curve = [
            (seconds if equal == "time" else step * per_step.get(equal, 1.0), value)
            for step, seconds, value in entry.get("curve" if judged == "loss" else "judged_curve", ())
            if value is not None
        ]
        if curve:
            measured[entry["variant"]].append(np.array(curve).T)
    points = [point for label, curves in measured.items() for point in _mean_curve(label, curves)]
    if not points:
        return None
    labels = [*data["definition"]["variants"]]
    colours = [css_variable(SERIES[index % len(SERIES)]) for index in range(len(labels))]
    dashes = [DASHES[index // len(SERIES) % len(DASHES)] for index in range(len(labels))]
    legend = alt.Legend(orient="top", title=None, labelLimit=width, columns=4 if width > PHONE else 1)
    legend.symbolType, legend.symbolOpacity, legend.symbolFillColor = "stroke", 1, "transparent"
    base = alt.Chart(alt.Data(values=points)).encode(
        x=alt.X("used:Q", title=USED[equal], axis=alt.Axis(tickCount=width // 100)),
        color=alt.Color("variant:N", scale=alt.Scale(domain=labels, range=colours), legend=legend),
    )
    axis, scale = alt.Axis(title=f"held-out {judged}", tickCount=5), _scale(points, judged)
    bands = base.mark_area(opacity=0.18, clip=True).encode(y=alt.Y("low:Q", axis=axis, scale=scale), y2="high:Q")
    lines = base.mark_line(strokeWidth=2.5, clip=True).encode(
        y=alt.Y("loss:Q", axis=axis, scale=scale),
        strokeDash=alt.StrokeDash("variant:N", scale=alt.Scale(domain=labels, range=dashes), legend=None),
    )
    caption = "Lines are means over seeds; bands reach from the lowest to the highest seed."
    chart = alt.layer(bands, lines).properties(width=width, height=340 if width > PHONE else 240)
    return f"Held-out {judged} over {'time' if equal == 'time' else USED[equal]}", caption, chart


def _mean_curve(label: str, curves: Sequence[np.ndarray]) -> list[dict[str, Any]]:
    """Return the points of a variant's mean curve, with the lowest and the highest run. A run's curve (2, n) has used
    amounts and losses. Where runs are not measured at equal amounts, their losses are interpolated, from the first
    amount that all runs reached to the last."""
    grid = curves[0][0]
    if any(not np.array_equal(used, grid) for used, _ in curves):
        first, last = max(used[0] for used, _ in curves), min(used[-1] for used, _ in curves)
        grid = np.unique(np.linspace(min(first, last), last, INTERPOLATED))
    losses = np.array([np.interp(grid, used, values) for used, values in curves])
    rows = zip(grid, losses.mean(0), losses.min(0), losses.max(0), strict=True)
    return [
        {"variant": label, **dict(zip(("used", "loss", "low", "high"), map(float, row), strict=True))} for row in rows
    ]


def _scale(points: Sequence[Mapping[str, Any]], judged: str) -> alt.Scale:
    """Return a y scale. For a loss, the scale cuts off the steep beginning of the curve."""
    begin = BEGINNING * max(point["used"] for point in points)
    most = {"domainMax": max(point["high"] for point in points if point["used"] >= begin)} if judged == "loss" else {}
    return alt.Scale(zero=False, **most)
