"""Records of a run as Altair charts. Colours come later, from `color_theme.chart_look`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import altair as alt

from thrifty.reporting.key_figures import KeyFigures
from thrifty.reporting.loss_curves import CurvePoint, curve, smooth, thin
from thrifty.reporting.number_format import prefix_for, scaled, significant
from thrifty.reporting.run_record import RunRecord

DRAWN_POINTS = 1000
HOVER_POINTS = 250
CHANGE_LINES = 60
NAMED_CHANGES = 4
SMOOTHED_FROM = 40
"""Shorter curves are drawn as they are."""

EACH, SMOOTHED, HELD_OUT, TRAINED = "each step", "smoothed", "held-out", "held-out, weights in training"
SERIES = [EACH, SMOOTHED, HELD_OUT, TRAINED]
"""In the order of the palette's category colours."""


@dataclass(frozen=True)
class ChartFigure:
    """One chart with the words around it."""

    id: str
    title: str
    unit: str
    summary: str
    """A sentence or two for those who do not see the chart."""
    chart: alt.LayerChart
    points: Sequence[CurvePoint]
    """The whole curve, for the table beside the chart."""
    held_out: Sequence[CurvePoint] = ()
    trained: Sequence[CurvePoint] = ()
    """Held-out losses of the weights in training, where an average of them is what is judged."""

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The chart in Vega-Lite. Its points are not held against a schema one by one: of a long run that takes
        seconds."""
        return self.chart.to_dict(validate=False)


@dataclass(frozen=True)
class ChartTheme:
    legend: tuple[str, ...] = ()
    scale: str = "linear"
    from_zero: bool = False
    number_format: str = "~s"
    height: int = 210

    def y(self) -> alt.Y:
        axis = alt.Axis(title=None, format=self.number_format, tickCount=5)
        return alt.Y("value:Q", axis=axis, scale=alt.Scale(type=self.scale, zero=self.from_zero))


def figures(record: RunRecord, key: KeyFigures) -> list[ChartFigure]:
    """The charts for which there are records, most important first."""
    first = [loss(record, key), *(metric(record, name) for name in key.measured), throughput(record, key)]
    others = [gradient_norm(record), learning_rate(record), memory(record, key), noise_scale(record)]
    return [figure for figure in (*first, *others) if figure is not None]


def loss(record: RunRecord, key: KeyFigures) -> ChartFigure | None:
    points, held_out = curve(record.steps, "loss"), curve(record.evaluations, "loss")
    if not points and not held_out:
        return None
    trained = curve(record.evaluations, "trained_loss")
    look = ChartTheme(_legend(points) + ((HELD_OUT,) if held_out else ()) + ((TRAINED,) if trained else ()))
    layers = [*_change_lines(record.events), *_curve_layers(points, look)]
    summary = describe("Training loss", points)
    if trained:
        layers.append(_evaluations_layer(trained, TRAINED, look))
        summary += f" Held-out loss of the weights in training ends at {significant(trained[-1].value)}."
    if held_out:
        layers.append(_evaluations_layer(held_out, HELD_OUT, look))
        summary += f" Held-out loss ends at {significant(held_out[-1].value)}."
    if key.unigram_entropy is not None:
        layers += _reference(key.unigram_entropy, f"unigram entropy {significant(key.unigram_entropy)}")
        summary += f" The unigram entropy is {significant(key.unigram_entropy)}."
    return ChartFigure("loss", "Loss", key.nats, summary, _together(layers, 320), points, held_out, trained)


def metric(record: RunRecord, name: str) -> ChartFigure | None:
    """A metric that evaluations measure in addition to the loss."""
    return _figure(name, f"Held-out {name}", name, curve(record.evaluations, name), ChartTheme())


def throughput(record: RunRecord, key: KeyFigures) -> ChartFigure | None:
    points = curve(record.steps, "tokens_per_second")
    if not points:
        return None
    layers = _curve_layers(points, ChartTheme(_legend(points)))
    summary = describe("Throughput", points) + f" The median is {scaled(median(point.value for point in points))}."
    return ChartFigure("throughput", "Throughput", f"{key.unit}/s", summary, _together(layers), points)


def learning_rate(record: RunRecord) -> ChartFigure | None:
    points, look = curve(record.steps, "learning_rate"), ChartTheme(number_format="~g", from_zero=True)
    return _figure("learning_rate", "Learning rate", "", points, look)


def gradient_norm(record: RunRecord) -> ChartFigure | None:
    points = curve(record.steps, "gradient_norm")
    unit, scale = scale_of_norms([point.value for point in points])
    return _figure("gradient_norm", "Gradient norm", unit, points, ChartTheme(_legend(points), scale))


def scale_of_norms(values: Sequence[float]) -> tuple[str, str]:
    """Unit and scale: a logarithmic one where a norm is far above the others."""
    spiky = len(values) > 0 and min(values) > 0 and max(values) > 20 * median(values)
    return ("logarithmic scale", "log") if spiky else ("", "linear")


def memory(record: RunRecord, key: KeyFigures) -> ChartFigure | None:
    points = curve(record.steps, "memory")
    if not points:
        return None
    peaks = [("predicted peak", key.predicted_memory), ("measured peak", key.peak_memory)]
    known = [(label, value) for label, value in peaks if value is not None]
    size, prefix = prefix_for(max([point.value for point in points] + [value for _, value in known]))
    shown = [CurvePoint(point.step, point.value / size) for point in points]
    layers = _curve_layers(shown, ChartTheme(from_zero=True))
    top = max((value for _, value in known), default=0.0)
    for label, value in known:
        layers += _reference(value / size, f"{label} {scaled(value, 'B')}", below=value < top)
    return ChartFigure("memory", "Memory", f"{prefix}B", describe("Memory in use", shown), _together(layers), shown)


def noise_scale(record: RunRecord) -> ChartFigure | None:
    points = [point for point in curve(record.notes, "noise_scale") if point.value > 0]
    look = ChartTheme(_legend(points), scale="log")
    return _figure("noise_scale", "Gradient noise scale", "examples", points, look)


def _figure(name: str, title: str, unit: str, points: Sequence[CurvePoint], look: ChartTheme) -> ChartFigure | None:
    if not points:
        return None
    return ChartFigure(name, title, unit, describe(title, points), _together(_curve_layers(points, look)), points)


def _legend(points: Sequence[CurvePoint]) -> tuple[str, ...]:
    return (EACH, SMOOTHED) if len(points) >= SMOOTHED_FROM else (SMOOTHED,) if points else ()


def _curve_layers(points: Sequence[CurvePoint], look: ChartTheme) -> list[alt.Chart]:
    """The curve; a smoothed one over it when the legend names both; points that answer to the pointer."""
    if not points:
        return []
    line = smooth(points) if EACH in look.legend else points
    marks = {"strokeJoin": "round", "aria": False}
    layers = [_chart(thin(line, DRAWN_POINTS), SMOOTHED, look).mark_line(strokeWidth=2, **marks)]
    if EACH in look.legend:
        layers.insert(0, _chart(thin(points, DRAWN_POINTS), EACH, look).mark_line(strokeWidth=1, **marks))
    layers[0] = layers[0].encode(y=look.y())
    return [*layers, hover_points(_chart(thin(line, HOVER_POINTS), SMOOTHED, look))]


def hover_points(chart: alt.Chart) -> alt.Chart:
    """Points that answer to the pointer."""
    nearest = alt.selection_point(nearest=True, on="pointerover", clear="pointerout", fields=["step"], empty=False)
    return (
        chart.mark_circle(style="hover", aria=False)
        .encode(
            opacity=alt.when(nearest).then(alt.value(1)).otherwise(alt.value(0)),
            tooltip=[alt.Tooltip("step:Q", format=","), alt.Tooltip("value:Q", format=".4~g")],
        )
        .add_params(nearest)
    )


def _evaluations_layer(points: Sequence[CurvePoint], series: str, look: ChartTheme) -> alt.Chart:
    drawn = thin(points, HOVER_POINTS)
    dots = alt.OverlayMarkDef(filled=True, size=40 if len(drawn) < 60 else 12)
    tooltip = [alt.Tooltip("step:Q", format=","), alt.Tooltip("value:Q", title=f"{series} loss", format=".4~g")]
    return _chart(drawn, series, look).mark_line(strokeWidth=1.5, point=dots, aria=False).encode(tooltip=tooltip)


def _reference(value: float, label: str, below: bool = False) -> list[alt.Chart]:
    """A dashed line across the chart with its name at the right end, above the line unless told `below`."""
    return reference_marks(alt.Chart(alt.Data(values=[{"value": value}])), alt.value(label), below)


def reference_marks(chart: alt.Chart, text: Any, below: bool) -> list[alt.Chart]:
    lines = chart.encode(y="value:Q")
    rule = lines.mark_rule(style="reference", aria=False)
    end = lines.encode(x=alt.value("width"), text=text)
    place = {"align": "right", "dx": -4, "dy": 11 if below else -9, "aria": False}
    return [rule, end.mark_text(style="reference-halo", **place), end.mark_text(style="reference-label", **place)]


def _change_lines(events: Sequence[Mapping[str, Any]]) -> list[alt.Chart]:
    values = [
        {"step": event["step"], "change": str(event.get("technique", "")), "reason": str(event.get("reason", ""))}
        for event in events
        if event["kind"] == "change"
    ]
    if not values:
        return []
    chart = alt.Chart(alt.Data(values=values[-CHANGE_LINES:])).encode(x=step_axis())
    rules = chart.mark_rule(style="change", aria=False).encode(tooltip=["step:Q", "change:N", "reason:N"])
    if len(values) > NAMED_CHANGES:
        return [rules]
    place = {"align": "left", "baseline": "top", "dx": 5, "limit": 200, "aria": False}
    return [rules, chart.mark_text(style="reference-label", **place).encode(y=alt.value(2), text="change:N")]


def _chart(points: Sequence[CurvePoint], series: str, look: ChartTheme) -> alt.Chart:
    legend = alt.Legend(values=list(look.legend), title=None, orient="top") if len(look.legend) > 1 else None
    return series_chart(alt.Data(values=rows(points)), series, "value:Q", legend)


def rows(points: Iterable[CurvePoint]) -> list[dict[str, Any]]:
    return [{"step": point.step, "value": float(f"{point.value:.5g}")} for point in points]


def series_chart(data: Any, series: str, y: Any, legend: alt.Legend | None = None) -> alt.Chart:
    colour = alt.Color("series:N", scale=alt.Scale(domain=SERIES), legend=legend)
    return alt.Chart(data).transform_calculate(series=f"'{series}'").encode(x=step_axis(), y=y, color=colour)


def step_axis() -> alt.X:
    return alt.X(
        "step:Q", axis=alt.Axis(title="step", format="~s", tickCount=6), scale=alt.Scale(nice=False, zero=False)
    )


def _together(layers: list[alt.Chart], height: int = 210) -> alt.LayerChart:
    return alt.layer(*layers).properties(width="container", height=height)


def describe(what: str, points: Sequence[CurvePoint]) -> str:
    """A curve in a sentence; its ends and its extremes are enough of it."""
    if not points:
        return f"{what} has no values yet."
    low, high = min(point.value for point in points), max(point.value for point in points)
    return (
        f"{what} goes from {significant(points[0].value)} at step {points[0].step:,} to "
        f"{significant(points[-1].value)} at step {points[-1].step:,}; "
        f"lowest {significant(low)}, highest {significant(high)}."
    )
