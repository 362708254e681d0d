"""Charts that grow: Vega-Lite with named data, so that a browser changes the data and draws nothing anew.

They look as those of the report do; colours come from `color_theme.chart_look` in the page.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt

from thrifty.dashboard.live_curves import Curve
from thrifty.dashboard.run_index import NOTED, RunIndex
from thrifty.reporting import run_charts
from thrifty.reporting.key_figures import KeyFigures
from thrifty.reporting.loss_curves import CurvePoint
from thrifty.reporting.number_format import prefix_for, scaled, significant
from thrifty.reporting.run_charts import EACH, HELD_OUT, SMOOTHED, TRAINED, ChartTheme
from thrifty.reporting.run_record import RunRecord
from thrifty.reporting.run_tables import CHART_ROWS, TextTable, curve_table

Rows = list[dict[str, Any]]
EACH_POINTS, LINE_POINTS = 600, 300
"""Points of a curve that go through the connection: of each step's values, and of the line over them."""


@dataclass(frozen=True)
class LiveFigure:
    """One chart as it is now: `spec` changes seldom, `data` (rows by the names that are in it) with every step."""

    id: str
    title: str
    unit: str
    summary: str
    legend: tuple[str, ...]
    spec: Mapping[str, Any]
    data: Mapping[str, Rows]
    table: TextTable


@dataclass(frozen=True)
class _Plot:
    """What is to be drawn of one quantity."""

    id: str
    title: str
    unit: str
    curve: Curve
    look: ChartTheme = field(default_factory=ChartTheme)
    held_out: Sequence[CurvePoint] = ()
    trained: Sequence[CurvePoint] = ()
    references: Sequence[tuple[float, str]] = ()
    changes: Sequence[Mapping[str, Any]] = ()
    smoothing: bool = True


def figures(index: RunIndex, record: RunRecord, key: KeyFigures) -> list[LiveFigure]:
    """The charts for which there are records, most important first."""
    steps, evaluations = index.steps, index.evaluations
    shares = [name for name in key.measured if name in evaluations.columns]
    of_rates = ChartTheme(from_zero=True, number_format="~g")
    plots = [
        _loss(index, record, key),
        *(_metric(name, evaluations.curve(name)) for name in shares),
        _memory(steps.curve("memory"), key),
        _Plot("throughput", "Throughput", f"{key.unit}/s", steps.curve("tokens_per_second")),
        _gradient_norm(steps.curve("gradient_norm")),
        _Plot("learning_rate", "Learning rate", "", steps.curve("learning_rate"), of_rates, smoothing=False),
        _noise_scale(steps.curve(NOTED)),
    ]
    return [_drawn(plot) for plot in plots if len(plot.curve) or plot.held_out]


def _loss(index: RunIndex, record: RunRecord, key: KeyFigures) -> _Plot:
    changes = [event for event in record.events if event["kind"] == "change"]
    entropy = key.unigram_entropy
    return _Plot(
        "loss",
        "Loss",
        key.nats,
        index.steps.curve("loss"),
        ChartTheme(height=320),
        held_out=index.evaluations.curve("loss").thin(LINE_POINTS),
        trained=index.evaluations.curve("trained_loss").thin(LINE_POINTS),
        references=[(entropy, f"unigram entropy {significant(entropy)}")] if entropy is not None else (),
        changes=changes[-run_charts.CHANGE_LINES :],
    )


def _metric(name: str, curve: Curve) -> _Plot:
    return _Plot(name, f"Held-out {name}", name, curve, smoothing=False)


def _memory(curve: Curve, key: KeyFigures) -> _Plot:
    """Memory in use against the predicted peak and the measured one; while a run goes on, the highest in use so far."""
    highest = float(curve.values.max()) if len(curve) else None
    measured = ("measured peak", key.peak_memory) if key.peak_memory is not None else ("highest so far", highest)
    known = [(label, value) for label, value in (("predicted peak", key.predicted_memory), measured) if value]
    size, prefix = prefix_for(max([highest or 0.0, *(value for _, value in known)]))
    references = [(value / size, f"{label} {scaled(value, 'B')}") for label, value in known]
    shown, look = Curve(curve.steps, curve.values / size), ChartTheme(from_zero=True)
    return _Plot("memory", "Memory", f"{prefix}B", shown, look, references=references, smoothing=False)


def _gradient_norm(curve: Curve) -> _Plot:
    unit, scale = run_charts.scale_of_norms(curve.values.tolist())
    return _Plot("gradient_norm", "Gradient norm", unit, curve, ChartTheme(scale=scale))


def _noise_scale(curve: Curve) -> _Plot:
    above = curve.values > 0
    curve = Curve(curve.steps[above], curve.values[above])
    return _Plot(NOTED, "Gradient noise scale", "examples", curve, ChartTheme(scale="log"))


def _drawn(plot: _Plot) -> LiveFigure:
    curve, smoothing = plot.curve, plot.smoothing and len(plot.curve) >= run_charts.SMOOTHED_FROM
    thinned = curve.thin(EACH_POINTS if smoothing else LINE_POINTS)
    line = curve.smooth(LINE_POINTS) if smoothing else thinned
    changes = [{"step": each["step"], "change": str(each.get("technique", ""))} for each in plot.changes]
    top = max((value for value, _ in plot.references), default=0.0)
    labels = [{"value": value, "label": label, "top": value == top} for value, label in plot.references]
    data = {
        "changes": changes,
        "named": changes if len(changes) <= run_charts.NAMED_CHANGES else [],
        "each": run_charts.rows(thinned) if smoothing else [],
        "smoothed": run_charts.rows(line),
        "held_out": run_charts.rows(plot.held_out),
        "trained": run_charts.rows(plot.trained),
        "above": [row for row in labels if row["top"]],
        "below": [row for row in labels if not row["top"]],
    }
    data = {name: rows for name, rows in data.items() if rows}
    drawn_as = {EACH: "each", SMOOTHED: "smoothed", HELD_OUT: "held_out", TRAINED: "trained"}
    legend = tuple(series for series in run_charts.SERIES if drawn_as[series] in data)
    summary = _summary(plot, thinned)
    table = curve_table(plot.title, plot.unit, curve.spans(CHART_ROWS), plot.held_out, plot.trained)
    spec = specification(plot.look, tuple(data))
    return LiveFigure(plot.id, plot.title, plot.unit, summary, legend if len(legend) > 1 else (), spec, data, table)


def _summary(plot: _Plot, thinned: Sequence[CurvePoint]) -> str:
    sentences = [run_charts.describe(plot.title, thinned)]
    if plot.held_out:
        sentences.append(f"Held-out loss ends at {significant(plot.held_out[-1].value)}.")
    sentences += [f"{label[0].upper()}{label[1:]}." for _, label in plot.references]
    return " ".join(sentences)


@functools.cache
def specification(look: ChartTheme, names: tuple[str, ...]) -> dict[str, Any]:
    """The Vega-Lite of a chart of these data, without them; Vega warns of a scale over data that are empty."""
    value = look.y()
    marks = {"strokeJoin": "round", "aria": False}
    dots = alt.OverlayMarkDef(filled=True, size=25)
    changes = _named("changes").encode(x=run_charts.step_axis(), tooltip=["change:N"])
    names_of_changes = _named("named").encode(x=run_charts.step_axis(), y=alt.value(2), text="change:N")
    smoothed = _series("smoothed", SMOOTHED, value)
    hover = run_charts.hover_points(_series("smoothed", SMOOTHED, value))
    layers = {
        "changes": [changes.mark_rule(style="change", aria=False)],
        "named": [names_of_changes.mark_text(style="reference-label", align="left", baseline="top", dx=5, aria=False)],
        "each": [_series("each", EACH, value).mark_line(strokeWidth=1, **marks)],
        "smoothed": [smoothed.mark_line(strokeWidth=2, **marks), hover],
        "trained": [_series("trained", TRAINED, value).mark_line(strokeWidth=1.5, point=dots, aria=False)],
        "held_out": [_series("held_out", HELD_OUT, value).mark_line(strokeWidth=1.5, point=dots, aria=False)],
        "above": run_charts.reference_marks(_named("above"), "label:N", below=False),
        "below": run_charts.reference_marks(_named("below"), "label:N", below=True),
    }
    drawn = [layer for name, each in layers.items() if name in names for layer in each]
    spec = alt.layer(*drawn).properties(width="container", height=look.height).to_dict()
    return {name: part for name, part in spec.items() if name != "$schema"}


def _series(name: str, series: str, value: alt.Y) -> alt.Chart:
    return run_charts.series_chart(alt.NamedData(name=name), series, value)


def _named(name: str) -> alt.Chart:
    return alt.Chart(alt.NamedData(name=name))
