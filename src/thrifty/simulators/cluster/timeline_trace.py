"""Exports of a pipeline timeline: a trace for Perfetto (ui.perfetto.dev) or chrome://tracing, and a chart."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt

from thrifty.simulators.cluster.pipeline_events import ActionEvent, PipelineTimeline

MICROSECOND = 1e-6
"""Time unit of a trace in seconds. Times in a trace have three decimals."""

WORDS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
COLOURS = {"F": "#0072b2", "B": "#d55e00", "I": "#e69f00", "W": "#009e73"}
"""Colors of Okabe and Ito (2008), suitable for color blindness, lightened for legible labels."""
INK = "#1b2026"

MOST_RANKS, MOST_BARS = 32, 8000
"""Maximum number of ranks and of bars in a chart. Selected ranks are evenly spaced and include first and last."""
MOST_LABELS = 600
"""Maximum number of events in a chart with labels of micro-batches."""


def trace(timeline: PipelineTimeline) -> dict[str, Any]:
    """Return the timeline in Chrome's trace event format.

    The trace has a row per rank, an event per action, arrows for transfers, and a curve of live micro-batches.
    """
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}})
        events += map(_slice, timeline.by_rank[rank])
        for time, micro_batches in timeline.live(rank):
            events.append(_at("C", time, rank, name=f"held by rank {rank}", args={"micro-batches": micro_batches}))
    for number, (source, target, action, start, end) in enumerate(timeline.transfers):
        name = "activations" if action.kind == "F" else "gradients"
        events.append(_at("s", start, source, name=name, cat="transfer", id=number))
        events.append(_at("f", end, target, name=name, cat="transfer", id=number))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(timeline: PipelineTimeline, path: Path) -> None:
    """Write the trace as a JSON file."""
    path.write_text(json.dumps(trace(timeline), separators=(",", ":")), encoding="utf-8")


def _slice(event: ActionEvent) -> dict[str, Any]:
    rank, (kind, stage, part), start, end = event
    described = {"stage": stage, "micro-batch": part}
    return _at("X", start, rank, name=f"{kind}{part}", cat=WORDS[kind], dur=_ticks(end - start), args=described)


def _at(phase: str, time: float, rank: int, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "ts": _ticks(time), "pid": 0, "tid": rank, **rest}


def _ticks(seconds: float) -> float:
    return round(seconds / MICROSECOND, 3)


def chart(timeline: PipelineTimeline) -> alt.LayerChart:
    """Return a chart with ranks as rows and actions as bars over time. White space is the bubble."""
    ranks = _chosen(timeline)
    rows = [_row(event) for rank in ranks for event in timeline.by_rank[rank]]
    kinds = [kind for kind in WORDS if any(row["kind"] == WORDS[kind] for row in rows)]
    scale = alt.Scale(domain=[WORDS[kind] for kind in kinds], range=[COLOURS[kind] for kind in kinds])
    legend = alt.Legend(title=None, orient="top", symbolOpacity=0.7)
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("rank:O", title="rank"))
    bars = base.mark_bar(aria=False, height={"band": 0.8}).encode(
        x=alt.X("start:Q", title="seconds", scale=alt.Scale(nice=False, domainMax=timeline.makespan or 1)),
        x2="end:Q",
        color=alt.Color("kind:N", scale=scale, legend=legend),
        opacity=alt.Opacity("shade:Q", scale=None),
    )
    layers = [bars]
    if len(rows) <= MOST_LABELS:
        labels = base.mark_text(color=INK, fontSize=10, aria=False)
        layers.append(labels.encode(x=alt.X("middle:Q"), text="part:N"))
    return alt.layer(*layers).properties(width=960, height=max(24 * len(ranks), 60))


def _chosen(timeline: PipelineTimeline) -> list[int]:
    longest = max(map(len, timeline.by_rank))
    count = min(timeline.ranks, MOST_RANKS, max(MOST_BARS // max(longest, 1), 2))
    return sorted({round(place * (timeline.ranks - 1) / max(count - 1, 1)) for place in range(count)})


def _row(event: ActionEvent) -> dict[str, Any]:
    rank, (kind, stage, part), start, end = event
    shade = 0.75 if part % 2 else 0.5
    place: Mapping[str, float] = {"start": start, "end": end, "middle": (start + end) / 2}
    return {"rank": rank, "kind": WORDS[kind], "stage": stage, "part": part, "shade": shade, **place}


def figure(timeline: PipelineTimeline, title: str) -> dict[str, Any]:
    """Return the chart with a title, as a Vega-Lite specification."""
    heading = {"text": title, "subtitle": _caption(timeline), "anchor": "start", "fontSize": 15, "offset": 12}
    return {**chart(timeline).to_dict(), "title": heading}


def _caption(timeline: PipelineTimeline) -> str:
    shown = len(_chosen(timeline))
    selection = f", {shown} of {timeline.ranks} ranks shown" if shown < timeline.ranks else ""
    return f"{timeline.makespan:.4g} s, bubble {timeline.bubble:.1%}{selection}"
