"""The page of the demo: the verdict in words, the curves of all programs, their values and texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt

from thrifty.reporting.color_theme import css_variable
from thrifty.reporting.comparison_charts import SERIES
from thrifty.reporting.result_page import BAD, GOOD, PageVerdict, ResultPage, page_chart
from thrifty.reporting.run_tables import TextTable

BEGINNING = 0.1
"""Fraction of the time axis whose higher losses are cut off."""


def write_page(
    folder: Path,
    about: str,
    verdict: str,
    is_faster: bool,
    table: TextTable,
    programs: Mapping[str, Any],
    reasons: Mapping[str, str],
) -> Path:
    """Write report.html in `folder`, and return its path."""
    headline, _, sentence = verdict.partition(": ")
    texts = [(label, each["text"]) for label, each in programs.items()]
    page = ResultPage(
        kind="demo",
        name="Time to equal quality",
        status="",
        about=about,
        verdicts=[PageVerdict(headline, sentence, tone=GOOD if is_faster else BAD)],
        statements=[("", f"Chosen {technique}", why) for technique, why in reasons.items()],
        charts=[
            page_chart(
                "Held-out loss over training time",
                "The first step, evaluations and planning are not counted. Lower is better.",
                lambda width: _curves(programs, width),
            )
        ],
        tables=[table, TextTable("Text after training", ("Program", "Text"), texts)],
        source="The values are in demo.json in this folder.",
    )
    path = folder / "report.html"
    path.write_text(page.render(), encoding="utf-8")
    return path


def _curves(programs: Mapping[str, Any], width: int) -> alt.LayerChart:
    points = [
        {"program": label, "seconds": seconds, "loss": loss}
        for label, each in programs.items()
        for seconds, loss in each["curve"]
    ]
    late = BEGINNING * max(point["seconds"] for point in points)
    scale = alt.Scale(zero=False, domainMax=max(point["loss"] for point in points if point["seconds"] >= late))
    colours = [css_variable(SERIES[index]) for index in range(len(programs))]
    legend = alt.Legend(orient="top", title=None, labelLimit=width, columns=4 if width > 500 else 1)
    chart = alt.Chart(alt.Data(values=points)).encode(
        x=alt.X("seconds:Q", title="seconds of training", axis=alt.Axis(tickCount=8)),
        y=alt.Y("loss:Q", title="held-out loss", scale=scale),
        color=alt.Color("program:N", scale=alt.Scale(domain=[*programs], range=colours), legend=legend),
    )
    lines = chart.mark_line(strokeWidth=2.5, clip=True)
    return alt.layer(lines, chart.mark_circle(size=30, clip=True)).properties(width=width, height=320)
