"""Plots of a study as Vega-Lite charts and images, with means as points and 95 % intervals as bars."""

import math
from typing import Any

import altair as alt

from thrifty.experiments.study import StudyPlot, level_text
from thrifty.experiments.study_result import StudyResult
from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.number_format import significant
from thrifty.reporting.result_page import CHARACTER, RowLabels

SERIES = ("train", "held-out", "trained", "violet", "olive", "cyan", "control", "ink")
"""Palette colors of lines."""
FILE = 460
"""Width in pixels of a plot in a file."""

Row = dict[str, Any]

LEVELS = 8
"""Maximum number of distinct x values for which each value has its own tick."""


def points(result: StudyResult, plot: StudyPlot) -> tuple[list[Row], list[str]]:
    """Return the rows of the plot (x, y, interval, line), and the labels of cases that are omitted because a value is
    infinite.
    """
    drawn, left_out = [], []
    for label, numbers in result.summary.items():
        settings = result.study.cases.get(label, {})
        if plot.y not in numbers or (plot.by and plot.by not in settings):
            continue
        x = label if plot.x == "case" else numbers[plot.x].mean if plot.x in numbers else settings.get(plot.x)
        y = numbers[plot.y]
        if x is None:
            continue
        if not math.isfinite(y.mean) or (isinstance(x, float) and not math.isfinite(x)):
            left_out.append(label)
            continue
        width = y.half_width if math.isfinite(y.half_width) else 0.0
        row = {"case": label, "x": x, "y": y.mean, "low": y.mean - width, "high": y.mean + width}
        drawn.append(row | ({"by": level_text(settings[plot.by])} if plot.by else {}))
    return drawn, left_out


def chart(result: StudyResult, plot: StudyPlot, width: int = FILE) -> alt.LayerChart:
    """Return a plot. `width` is its width in pixels, without the labels of the y axis."""
    drawn, _ = points(result, plot)
    lowest = min((row["y"] for row in drawn), default=1.0)
    for row in (
        drawn if plot.log_y else ()
    ):  # intervals may include values below zero, which a logarithmic axis cannot show
        row["low"] = max(row["low"], lowest / 2)
    base = alt.Chart(alt.Data(values=drawn)).encode(color=_colour(plot, drawn, width))
    scale = alt.Scale(type="log" if plot.log_y else "linear", zero=False, padding=12, nice=False)
    if plot.x == "case":
        return _by_case(base, plot, drawn, scale, width)
    base = base.encode(x=_x(plot, drawn))
    y = alt.Y("y:Q", title=_words(plot.y), scale=scale, axis=alt.Axis(tickCount=5))
    layers = [
        base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", title=_words(plot.y)), y2="high:Q"),
        base.mark_line(strokeWidth=1.5).encode(y=y),
        base.mark_circle(size=60, opacity=1).encode(y=y, tooltip=["case:N", "y:Q", "low:Q", "high:Q"]),
    ]
    return alt.layer(*layers).properties(width=width, height=280)


def _by_case(base: alt.Chart, plot: StudyPlot, drawn: list[Row], scale: alt.Scale, width: int) -> alt.LayerChart:
    """Return a plot with one row per case."""
    labels = RowLabels([str(row["x"]) for row in drawn], width)
    for row in drawn:
        row["x"] = labels.wrap(str(row["x"]))
    y = alt.Y("x:N", title=None, sort=None, axis=labels.axis())
    x = alt.X("y:Q", title=_words(plot.y), scale=scale, axis=alt.Axis(tickCount=5 if width > FILE else 4))
    layers = [
        base.mark_rule(strokeWidth=1.5).encode(x=alt.X("low:Q", title=_words(plot.y)), x2="high:Q", y=y),
        base.mark_circle(size=60, opacity=1).encode(x=x, y=y, tooltip=["case:N", "y:Q", "low:Q", "high:Q"]),
    ]
    return alt.layer(*layers).properties(**labels.size())


def _colour(plot: StudyPlot, drawn: list[Row], width: int) -> alt.Color | alt.ColorValue:
    if not plot.by:
        return alt.ColorValue(css_variable(SERIES[0]))
    names = list(dict.fromkeys(row["by"] for row in drawn))
    colours = [css_variable(SERIES[index % len(SERIES)]) for index in range(len(names))]
    longest = max(map(len, names), default=1)
    columns = max(1, width // (CHARACTER * longest + 40))
    legend = alt.Legend(title=_words(plot.by), orient="top", columns=columns, labelLimit=width)
    return alt.Color("by:N", scale=alt.Scale(domain=names, range=colours), legend=legend)


def _x(plot: StudyPlot, drawn: list[Row]) -> alt.X:
    if all(isinstance(row["x"], int | float) for row in drawn):
        levels = sorted({row["x"] for row in drawn})
        few = {"values": levels} if len(levels) <= LEVELS else {"tickCount": LEVELS}
        whole = all(row["x"] == int(row["x"]) and row["x"] < 1e6 for row in drawn)
        large = max((row["x"] for row in drawn), default=0) >= 1e6
        axis = alt.Axis(format=",d" if whole else ".3~s" if large else ".3~g", **few)
        scale = alt.Scale(type="log" if plot.log_x else "linear", zero=False, nice=False, padding=16)
        return alt.X("x:Q", title=_words(plot.x), scale=scale, axis=axis)
    return alt.X("x:N", title=_words(plot.x), sort=None, axis=alt.Axis(labelAngle=0))


def titled_chart(result: StudyResult, plot: StudyPlot) -> dict[str, Any]:
    """Return a plot with its title, for files."""
    title = {"text": plot.title, "anchor": "start", "fontSize": 15, "offset": 12, "color": css_variable("ink")}
    return {**chart(result, plot).to_dict(), "title": title}


def caption(result: StudyResult, plot: StudyPlot) -> str:
    """Return a text alternative of the plot, with the labels of omitted cases."""
    drawn, left_out = points(result, plot)
    if not drawn:
        return f"{plot.title}: no finite values."
    low, high = min(drawn, key=lambda row: row["y"]), max(drawn, key=lambda row: row["y"])
    text = (
        f"Lowest {_words(plot.y)} {significant(low['y'])} ({low['case']}), highest {significant(high['y'])} "
        f"({high['case']}). Bars are 95 % intervals over seeds."
    )
    return text + (f" Not drawn, because values are infinite: {'; '.join(left_out)}." if left_out else "")


def _words(name: str) -> str:
    return name.replace("_", " ")
