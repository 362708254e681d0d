"""Timelines as traces and charts: each event is present at the right time."""

import json
from pathlib import Path

import pytest

from thrifty.reporting.chart_renderer import render_png
from thrifty.reporting.saved_chart import SavedChart
from thrifty.simulators.cluster.pipeline_events import PipelineTimeline, play
from thrifty.simulators.cluster.pipeline_schedules import SCHEDULES, schedule
from thrifty.simulators.cluster.timeline_trace import MOST_BARS, MOST_RANKS, chart, figure, trace, write_trace


def timeline_of(name: str, ranks: int = 4, parts: int = 8) -> PipelineTimeline:
    chunks = 2 if name in ("interleaved", "zero_bubble_v") else 1
    orders = schedule(name, ranks, parts, chunks)
    return play(orders, lambda action: 1e-3 * (1 + action.stage), lambda source, target: 2e-4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_traces_have_every_event_at_its_time(name: str, tmp_path: Path) -> None:
    timeline = timeline_of(name)
    write_trace(timeline, tmp_path / "trace.json")
    loaded = json.loads((tmp_path / "trace.json").read_text())
    assert loaded == json.loads(json.dumps(trace(timeline)))
    slices = [event for event in loaded["traceEvents"] if event["ph"] == "X"]
    result = {(at["tid"], at["name"], at["args"]["stage"]): (at["ts"], at["dur"]) for at in slices}
    assert len(result) == len(slices) == len(timeline.events)
    for rank, (kind, stage, part), start, end in timeline.events:
        assert result[rank, f"{kind}{part}", stage] == pytest.approx((start * 1e6, (end - start) * 1e6), abs=1e-3)


def test_traces_show_ranks_transfers_and_held_batches() -> None:
    timeline = timeline_of("1f1b")
    events = trace(timeline)["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    starts = [event for event in events if event["ph"] == "s"]
    assert len(starts) == len(ends) == len(timeline.transfers) == 2 * 3 * 8
    for event, (source, target, _, start, end) in zip(starts, timeline.transfers, strict=True):
        there = ends[event["id"]]
        assert (event["tid"], there["tid"]) == (source, target)
        assert (event["ts"], there["ts"]) == pytest.approx((start * 1e6, end * 1e6), abs=1e-3)
    micro_batches = [event["args"]["micro-batches"] for event in events if event["ph"] == "C" and event["tid"] == 0]
    assert max(micro_batches) == 4
    assert micro_batches[-1] == 0


def bars(timeline: PipelineTimeline) -> list[dict]:
    return chart(timeline).to_dict()["data"]["values"]


def test_charts_have_a_bar_for_every_event() -> None:
    timeline = timeline_of("zero_bubble")
    shown = {(bar["rank"], bar["start"], bar["end"]) for bar in bars(timeline)}
    assert shown == {(event.rank, event.start, event.end) for event in timeline.events}
    image = SavedChart(figure(timeline, "Zero bubble"))._repr_svg_()
    for word in (
        "Zero bubble",
        "forward",
        "gradient of inputs",
        "gradient of weights",
        f"bubble {timeline.bubble:.1%}",
    ):
        assert word in image
    assert ">backward<" not in image
    assert render_png(figure(timeline, "Zero bubble"), {}).startswith(b"\x89PNG")


@pytest.mark.slow
def test_charts_of_many_ranks_show_a_selection() -> None:
    timeline = timeline_of("1f1b", ranks=MOST_RANKS + 8, parts=4)
    ranks = {bar["rank"] for bar in bars(timeline)}
    assert ranks >= {0, MOST_RANKS + 7}
    assert len(ranks) == MOST_RANKS
    assert f"{MOST_RANKS} of {MOST_RANKS + 8} ranks shown" in SavedChart(figure(timeline, "Many ranks"))._repr_svg_()
    assert len(bars(timeline_of("1f1b", ranks=16, parts=512))) <= MOST_BARS
