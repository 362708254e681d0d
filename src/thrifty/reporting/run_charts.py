"""Charts of a run's records as Vega-Lite with named data. A live page can update the data without a redraw.

`color_theme.chart_look` adds the colors.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import numpy as np

from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.key_figures import KeyFigures
from thrifty.reporting.number_format import prefix_for, scaled, significant
from thrifty.reporting.run_curves import NOTED, Curve, CurvePoint, RunCurves, StepColumns, curves_of
from thrifty.reporting.run_record import RunRecord
from thrifty.reporting.run_tables import CHART_ROWS, TextTable, curve_table

Rows = list[dict[str, Any]]
EACH_POINTS, LINE_POINTS = 600, 300
"""Maximum number of points of per-step values, and of the smoothed line."""
CHANGE_LINES, NAMED_CHANGES = 60, 4
SMOOTHED_FROM = 40
"""Minimum number of points for smoothing. Shorter curves are drawn unchanged."""
SERIES = {
    "each": "each step",
    "smoothed": "smoothed",
    "held_out": "held-out",
    "trained": "held-out, weights in training",
}
"""Series names by data name, in the order of the palette's category colors."""
OVERLAID = ("train", "held-out", "trained", "bad", "control", "faint")
"""Palette colors of runs in one chart."""
NO_CURVE = Curve(np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class ChartFigure:
    """Chart with title, text alternative and table. `data` (rows by name) changes at every step, but `spec` rarely
    changes.
    """

    id: str
    title: str
    unit: str
    summary: str
    """Text alternative of the chart, in one or two sentences."""
    spec: Mapping[str, Any]
    data: Mapping[str, Rows]
    table: TextTable

    @property
    def titled(self) -> dict[str, Any]:
        """Complete chart with a title, for files."""
        text = f"{self.title}, {self.unit}" if self.unit else self.title
        title = {"text": text, "anchor": "start", "fontSize": 15, "offset": 12, "color": css_variable("ink")}
        return {**self.whole, "width": 640, "height": 320, "title": title}

    @property
    def whole(self) -> dict[str, Any]:
        """Complete Vega-Lite chart, including its data."""
        return {**self.spec, "datasets": self.data}


@dataclass(frozen=True)
class ChartTheme:
    scale: str = "linear"
    from_zero: bool = False
    number_format: str = "~g"
    height: int = 210

    def y(self) -> alt.Y:
        axis = alt.Axis(title=None, format=self.number_format, tickCount=5)
        return alt.Y("value:Q", axis=axis, scale=alt.Scale(type=self.scale, zero=self.from_zero))


@dataclass(frozen=True)
class _Plot:
    """Curves of one quantity in one chart."""

    id: str
    title: str
    unit: str
    curve: Curve
    look: ChartTheme = field(default_factory=ChartTheme)
    held_out: Curve = NO_CURVE
    trained: Curve = NO_CURVE
    """Held-out losses of the trained weights; empty unless averaged weights are evaluated in addition."""
    references: Sequence[tuple[float, str]] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    remark: str = ""
    smoothing: bool = True


def figures(record: RunRecord, key: KeyFigures, curves: RunCurves | None = None) -> list[ChartFigure]:
    """Return all charts with data, most important first. By default, `curves` are the curves of the record."""
    curves = curves or curves_of(record)
    steps, evaluations = curves.steps, curves.evaluations
    metrics = [name for name in key.measured if name in evaluations.columns]
    of_rates = ChartTheme(from_zero=True)
    plots = [
        _loss(steps.curve("loss"), evaluations, record, key),
        *(_Plot(name, f"Held-out {name}", name, evaluations.curve(name), smoothing=False) for name in metrics),
        _memory(steps.curve("memory"), key),
        _throughput(steps.curve("tokens_per_second"), key),
        _gradient_norm(steps.curve("gradient_norm")),
        _Plot("learning_rate", "Learning rate", "", steps.curve("learning_rate"), of_rates, smoothing=False),
        _noise_scale(steps.curve(NOTED)),
    ]
    return [_figure(plot) for plot in plots if len(plot.curve) or len(plot.held_out)]


def overlaid(runs: Mapping[str, RunCurves]) -> list[ChartFigure]:
    """Return charts with the curves of several runs in one chart, keyed by the name of a run."""
    held_out = {name: curves.evaluations.curve("loss") for name, curves in runs.items()}
    loss = {name: curves.steps.curve("loss") for name, curves in runs.items()}
    seconds = {name: _in_seconds(held_out[name], curves.steps.curve("seconds")) for name, curves in runs.items()}
    speed = {name: curves.steps.curve("tokens_per_second") for name, curves in runs.items()}
    memory = {name: curves.steps.curve("memory") for name, curves in runs.items()}
    charts = [
        _overlay("held_out", "Held-out loss", "by step", held_out, "step"),
        _overlay("held_out_seconds", "Held-out loss", "by seconds of training", seconds, "seconds"),
        _overlay("loss", "Training loss", "smoothed", loss, "step"),
        _overlay("throughput", "Throughput", "examples or tokens per second", speed, "step"),
        _overlay("memory", "Memory of model and steps", "bytes", memory, "step"),
    ]
    return [chart for chart in charts if chart.data["runs"]]


def _in_seconds(curve: Curve, seconds: Curve) -> Curve:
    """Return the curve with seconds of training instead of steps."""
    if not len(seconds):
        return NO_CURVE
    return Curve(np.interp(curve.steps, seconds.steps, seconds.values).round(3), curve.values)


def _overlay(id: str, title: str, unit: str, curves: Mapping[str, Curve], x: str) -> ChartFigure:
    names = list(curves)
    rows, ends = [], []
    for name, curve in curves.items():
        points = curve.smooth(LINE_POINTS) if len(curve) >= SMOOTHED_FROM else curve.points
        rows += [{**row, "run": name} for row in _rows(points)]
        ends.append((name, significant(curve.last, 4), significant(curve.lowest, 4)))
    colours = [css_variable(OVERLAID[index % len(OVERLAID)]) for index in range(len(names))]
    colour = alt.Color(
        "run:N", scale=alt.Scale(domain=names, range=colours), legend=alt.Legend(title=None, orient="top")
    )
    tooltip = [alt.Tooltip("run:N"), alt.Tooltip("step:Q", title=x, format=","), alt.Tooltip("value:Q", format=".4~g")]
    look = ChartTheme(height=320 if id == "held_out" else 210)
    dots = alt.OverlayMarkDef(filled=True, size=18) if id.startswith("held_out") else alt.Undefined
    chart = _named("runs").mark_line(strokeWidth=2, point=dots, aria=False)
    chart = chart.encode(x=_step_axis(x), y=look.y(), color=colour, tooltip=tooltip)
    spec = chart.properties(width="container", height=look.height).to_dict(validate=False)
    spec = {name: part for name, part in spec.items() if name != "$schema"}
    said = "; ".join(f"{name} ends at {last}" for name, last, _ in ends)
    table = TextTable(f"{title} {unit}", ("Run", "Last", "Lowest"), ends, frozenset({1, 2}))
    return ChartFigure(id, title, unit, f"{title} {unit}: {said}.", spec, {"runs": rows}, table)


def _loss(curve: Curve, evaluations: StepColumns, record: RunRecord, key: KeyFigures) -> _Plot:
    entropy = key.unigram_entropy
    return _Plot(
        "loss",
        "Loss",
        key.nats,
        curve,
        ChartTheme(height=320),
        held_out=evaluations.curve("loss"),
        trained=evaluations.curve("trained_loss"),
        references=[(entropy, f"unigram entropy {significant(entropy)}")] if entropy is not None else (),
        changes=[event for event in record.events if event["kind"] == "change"][-CHANGE_LINES:],
    )


def _memory(curve: Curve, key: KeyFigures) -> _Plot:
    """Return the memory plot with the predicted peak, and the measured peak or the highest value so far.

    On a CPU, all values of a finished run are those of the whole process.
    """
    curve = Curve(curve.steps, curve.values + key.process_memory)
    highest = float(curve.values.max()) if len(curve) else None
    measured = ("measured peak", key.peak_memory) if key.peak_memory is not None else ("highest so far", highest)
    known = [(label, value) for label, value in (("predicted peak", key.predicted_memory), measured) if value]
    size, prefix = prefix_for(max([highest or 0.0, *(value for _, value in known)]))
    references = [(value / size, f"{label} {scaled(value, 'B')}") for label, value in known]
    scaled_curve, look = Curve(curve.steps, curve.values / size), ChartTheme(from_zero=True)
    return _Plot("memory", "Memory", f"{prefix}B", scaled_curve, look, references=references, smoothing=False)


def _throughput(curve: Curve, key: KeyFigures) -> _Plot:
    remark = f"The median is {scaled(curve.median)}." if len(curve) else ""
    return _Plot("throughput", "Throughput", f"{key.unit}/s", curve, ChartTheme(number_format="~s"), remark=remark)


def _gradient_norm(curve: Curve) -> _Plot:
    """Return the plot of gradient norms. The scale is logarithmic if one norm is far above the others."""
    values = curve.values
    spiky = len(values) > 0 and values.min() > 0 and values.max() > 20 * np.median(values)
    unit, scale = ("logarithmic scale", "log") if spiky else ("", "linear")
    return _Plot("gradient_norm", "Gradient norm", unit, curve, ChartTheme(scale=scale))


def _noise_scale(curve: Curve) -> _Plot:
    above = curve.values > 0
    curve = Curve(curve.steps[above], curve.values[above])
    return _Plot(NOTED, "Gradient noise scale", "examples", curve, ChartTheme(scale="log", number_format="~s"))


def _figure(plot: _Plot) -> ChartFigure:
    curve, smoothing = plot.curve, plot.smoothing and len(plot.curve) >= SMOOTHED_FROM
    thinned = curve.thin(EACH_POINTS if smoothing else LINE_POINTS)
    changes = [
        {"step": each["step"], "change": str(each.get("technique", "")), "reason": str(each.get("reason", ""))}
        for each in plot.changes
    ]
    top = max((value for value, _ in plot.references), default=0.0)
    labels = [{"value": value, "label": label, "top": value == top} for value, label in plot.references]
    data = {
        "changes": changes,
        "named": changes if len(changes) <= NAMED_CHANGES else [],
        "each": _rows(thinned) if smoothing else [],
        "smoothed": _rows(curve.smooth(LINE_POINTS) if smoothing else thinned),
        "held_out": _rows(plot.held_out.thin(LINE_POINTS)),
        "trained": _rows(plot.trained.thin(LINE_POINTS)),
        "above": [row for row in labels if row["top"]],
        "below": [row for row in labels if not row["top"]],
    }
    data = {name: rows for name, rows in data.items() if rows}
    table = curve_table(plot.title, plot.unit, curve.spans(CHART_ROWS), plot.held_out.points, plot.trained.points)
    spec = specification(plot.look, tuple(data))
    return ChartFigure(plot.id, plot.title, plot.unit, _summary(plot, thinned), spec, data, table)


def _summary(plot: _Plot, thinned: Sequence[CurvePoint]) -> str:
    """Return the text alternative of a curve: first and last value, extremes, and reference lines."""
    sentences = [f"{plot.title} has no values yet."]
    if thinned:
        low, high = min(point.value for point in thinned), max(point.value for point in thinned)
        first, last = thinned[0], thinned[-1]
        sentences = [
            f"{plot.title} starts at {significant(first.value)} at step {first.step:,} and ends at "
            f"{significant(last.value)} at step {last.step:,}; lowest {significant(low)}, highest {significant(high)}."
        ]
    evaluated = {"Held-out loss of the weights in training": plot.trained, "Held-out loss": plot.held_out}
    sentences += [f"{words} ends at {significant(curve.last)}." for words, curve in evaluated.items() if len(curve)]
    sentences += [f"{label[0].upper()}{label[1:]}." for _, label in plot.references]
    return " ".join([*sentences, plot.remark]).strip()


@functools.cache
def specification(look: ChartTheme, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the Vega-Lite spec of a chart without its data. Empty series are omitted, because Vega warns about
    them.
    """
    shown = [series for name, series in SERIES.items() if name in names]
    legend = alt.Legend(values=shown, title=None, orient="top") if len(shown) > 1 else None
    colour = alt.Color("series:N", scale=alt.Scale(domain=list(SERIES.values())), legend=legend)

    def series(name: str) -> alt.Chart:
        chart = _named(name).transform_calculate(series=f"'{SERIES[name]}'")
        return chart.encode(x=_step_axis(), y=look.y(), color=colour)

    marks = {"strokeJoin": "round", "aria": False}
    changes = _named("changes").encode(x=_step_axis(), tooltip=["step:Q", "change:N", "reason:N"])
    names_of_changes = _named("named").encode(x=_step_axis(), y=alt.value(2), text="change:N")
    label = {"style": "reference-label", "align": "left", "baseline": "top", "dx": 5, "limit": 200, "aria": False}
    layers = {
        "changes": [changes.mark_rule(style="change", aria=False)],
        "named": [names_of_changes.mark_text(**label)],
        "each": [series("each").mark_line(strokeWidth=1, **marks)],
        "smoothed": [series("smoothed").mark_line(strokeWidth=2, **marks), _hover_points(series("smoothed"))],
        "trained": [_evaluations(series("trained"), SERIES["trained"])],
        "held_out": [_evaluations(series("held_out"), SERIES["held_out"])],
        "above": _reference(_named("above"), below=False),
        "below": _reference(_named("below"), below=True),
    }
    drawn = [layer for name, each in layers.items() if name in names for layer in each]
    spec = alt.layer(*drawn).properties(width="container", height=look.height).to_dict(validate=False)
    return {name: part for name, part in spec.items() if name != "$schema"}  # the schema URL is not needed


def _hover_points(chart: alt.Chart) -> alt.Chart:
    """Add points that show a tooltip when the pointer hovers over them."""
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", fields=["step"], empty=False)
    return (
        chart.mark_circle(style="hover", aria=False)
        .encode(
            opacity=alt.when(nearest).then(alt.value(1)).otherwise(alt.value(0)),
            tooltip=[alt.Tooltip("step:Q", format=","), alt.Tooltip("value:Q", format=".4~g")],
        )
        .add_params(nearest)
    )


def _evaluations(chart: alt.Chart, series: str) -> alt.Chart:
    dots = alt.OverlayMarkDef(filled=True, size=25)
    tooltip = [alt.Tooltip("step:Q", format=","), alt.Tooltip("value:Q", title=f"{series} loss", format=".4~g")]
    return chart.mark_line(strokeWidth=1.5, point=dots, aria=False).encode(tooltip=tooltip)


def _reference(chart: alt.Chart, below: bool) -> list[alt.Chart]:
    """Return dashed reference lines across the chart. The names of the lines are at the right end, above or below each
    line.
    """
    lines = chart.encode(y="value:Q")
    rule = lines.mark_rule(style="reference", aria=False)
    end = lines.encode(x=alt.value("width"), text="label:N")
    place = {"align": "right", "dx": -4, "dy": 11 if below else -9, "aria": False}
    return [rule, end.mark_text(style="reference-halo", **place), end.mark_text(style="reference-label", **place)]


def _rows(points: Iterable[CurvePoint]) -> Rows:
    return [{"step": point.step, "value": float(f"{point.value:.5g}")} for point in points]


def _step_axis(title: str = "step") -> alt.X:
    axis = alt.Axis(title=title, format="~s" if title == "step" else ",~g", tickCount=6)
    return alt.X("step:Q", axis=axis, scale=alt.Scale(nice=False, zero=False))


def _named(name: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=name))
