"""Page of a benchmark: charts of its times, values and predictions, and its tables."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import altair as alt

from thrifty.dashboard.saved_results import tables
from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.number_format import percent, scaled, significant
from thrifty.reporting.result_page import PageChart, ResultPage, RowLabels, page_chart
from thrifty.reporting.run_record import mapping, mappings, number

MOST_CHARTS, MOST_BARS, DEEPEST = 8, 24, 4
SECONDS, BYTES = "seconds", "bytes"
Bars = Mapping[str, float]


def benchmark_page(data: Mapping[str, Any], name: str, kind: str, about: str) -> str:
    """Return the page of a result without a page of its own."""
    found = [*_predictions(data), *_bars(data, "")][:MOST_CHARTS]
    values = tables(data)
    facts = {**data, **mapping(data.get("environment"))}
    return ResultPage(
        kind=kind.removesuffix("s"),
        name=name,
        status="",
        about=about or str(data.get("benchmark", "")),
        cautions=[] if values else ["This result has no tables, or is too large to read."],
        charts=found,
        folded=values if found else [],
        tables=[] if found else values,
        facts=facts | {"command": facts["command"].split()} if isinstance(facts.get("command"), str) else facts,
        source=f"The values are in {name}.json.",
    ).render()


def _bars(data: Mapping[str, Any], path: str) -> Iterator[PageChart]:
    """Yield a chart for each mapping with at least two comparable values, such as medians of seconds."""
    for name, value in data.items():
        if not isinstance(value, dict) or name in ("environment", "openmp", "definition", "settings", "shape"):
            continue
        title = f"{path}, {name}" if path else name
        numbers = {label: size for label, each in value.items() if (size := _size(each)) is not None}
        if len(numbers) > 1 and len(numbers) == len(value):
            shown = dict(list(numbers.items())[:MOST_BARS])
            unit = "s" if _is_time(title, value) else "B" if BYTES in title or "memory" in title else ""
            low, high = min(shown, key=shown.__getitem__), max(shown, key=shown.__getitem__)
            caption = f"Lowest: {low}, {_text(shown[low], unit)}; highest: {high}, {_text(shown[high], unit)}."
            yield page_chart(title[:1].upper() + title[1:], caption, partial(_bar_chart, shown, unit), is_whole=False)
        elif path.count(",") < DEEPEST:
            yield from _bars(value, title)


def _size(value: Any) -> float | None:
    """Return a number, the median of repeated numbers, or the median or the seconds of a measurement."""
    if isinstance(value, dict):
        return number(value.get("median", value.get(SECONDS)))
    if isinstance(value, list):
        numbers = [each for each in map(number, value) if each is not None]
        return median(numbers) if numbers and len(numbers) == len(value) else None
    return number(value)


def _is_time(title: str, values: Mapping[str, Any]) -> bool:
    return SECONDS in title or any(isinstance(each, dict) for each in values.values())


def _text(value: float, unit: str) -> str:
    return scaled(value, unit) if unit else significant(value)


def _bar_chart(values: Bars, unit: str, width: int) -> alt.LayerChart:
    labels = RowLabels(list(values), width - 50)
    rows = [{"label": labels.wrap(name), "value": value, "text": _text(value, unit)} for name, value in values.items()]
    y = alt.Y("label:N", title=None, sort=None, axis=labels.axis())
    base = alt.Chart(alt.Data(values=rows)).encode(y=y, x=alt.X("value:Q", axis=None))
    bars = base.mark_bar(color=css_variable("train"), height={"band": 0.6})
    texts = base.mark_text(align="left", dx=5, color=css_variable("ink"), fontSize=12).encode(text="text:N")
    return alt.layer(bars, texts).properties(**labels.size())


def _predictions(data: Mapping[str, Any]) -> Iterator[PageChart]:
    """Yield a chart of predicted and measured values for each pair of such columns in the cases."""
    cases = mappings(data.get("cases")) if isinstance(data.get("cases"), list) else []
    for name in dict.fromkeys(key for case in cases for key in case if key.startswith("predicted")):
        other = name.replace("predicted", "measured")
        pairs = [(number(case.get(name)), number(case.get(other))) for case in cases]
        points = [(x, y) for x, y in pairs if x and y and x > 0 and y > 0]
        if len(points) > 1:
            quantity = name.removeprefix("predicted").strip("_") or "memory"
            off = median(abs(x / y - 1) for x, y in points)
            caption = f"{len(points)} cases; median error {percent(off, 2)}. On the line, the prediction is exact."
            drawn = partial(_scatter, points, "s" if quantity == "step" else "B")
            yield page_chart(f"Predicted and measured {quantity}", caption, drawn, is_whole=False)


def _scatter(points: Sequence[tuple[float, float]], unit: str, width: int) -> alt.LayerChart:
    rows = [{"predicted": x, "measured": y} for x, y in points]
    ends = [min(map(min, points)), max(map(max, points))]
    scale = alt.Scale(type="log", domain=ends, nice=False, padding=10)
    axis = alt.Axis(format=".2~s", tickCount=4)
    line = alt.Chart(alt.Data(values=[{"predicted": end, "measured": end} for end in ends])).mark_line(
        strokeDash=[5, 4], strokeWidth=1.25, color=css_variable("muted")
    )
    dots = alt.Chart(alt.Data(values=rows)).mark_circle(size=28, opacity=0.7, color=css_variable("train"))
    x = alt.X("measured:Q", title=f"measured, {unit}", scale=scale, axis=axis)
    y = alt.Y("predicted:Q", title=f"predicted, {unit}", scale=scale, axis=axis)
    return alt.layer(*(part.encode(x=x, y=y) for part in (line, dots))).properties(width=width, height=260)
