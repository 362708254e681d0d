"""The offline page of a comparison: bars for every design and filter, without scripts or remote files."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from thrifty.cli.simulate import command
from thrifty.interface.design_comparison import compare_designs
from thrifty.interface.design_page import write_page
from thrifty.reporting.bar_page import LEFT, RIGHT, WIDTH, StackedBar, bars, legend, table
from thrifty.simulators.accelerator.accelerator_file import find_machine
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.design_filters import apply_design_filter
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace
from thrifty.simulators.accelerator.trace_file import save_trace

NAMES = ["elsa", "vitcod", "dense"]


def recorded(name: str = "r") -> AttentionTrace:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 2, 32, 16)).astype(np.float32) for _ in range(3))
    return AttentionTrace(name, (layer_of("l", q=q, k=k, v=v),))


def test_bar_lengths_equal_their_values() -> None:
    rows = [
        ("one", {"a": StackedBar((1.0, 3.0), "4 <b>"), "b": StackedBar((2.0,), "2")}),
        ("two", {"b": StackedBar((0.0,), "0")}),
    ]
    svg = bars("lengths & more", rows, ("a", "b"))
    rectangles = re.findall(
        r'<rect x="([0-9.]+)" y="([0-9.]+)" width="([0-9.]+)" [^>]*fill="var\(--([a-z-]+)\)" opacity="([0-9.]+)"', svg
    )
    longest = WIDTH - LEFT - RIGHT
    assert [float(width) for _, _, width, *_ in rectangles] == [longest / 4, longest * 3 / 4, longest / 2, 0]
    assert float(rectangles[1][0]) == pytest.approx(LEFT + longest / 4)
    assert [colour for *_, colour, _ in rectangles] == ["train", "train", "held-out", "held-out"]
    assert [opacity for *_, opacity in rectangles] == ["1.00", "0.40", "1.00", "1.00"]
    assert "4 &lt;b&gt;" in svg and "lengths &amp; more" in svg
    assert bars("none", [], ()).startswith("<svg") and legend(("one",)) == ""
    assert table(["a", "b"], [["<x>", "1"]], ["b"]).count('class="number"') == 2


def test_page_of_a_comparison(tmp_path: Path) -> None:
    trace = recorded("<script>alert(1)</script>")
    masks = {
        name: dict.fromkeys(NAMES, given)
        for name, given in (("trace", trace), ("own", apply_design_filter(trace, "elsa", 0.3)))
    }
    machines = [find_machine(name) for name in NAMES]
    comparison = compare_designs(machines, trace, masks, "scan", "horowitz-45nm", draw=False, measure=True)
    write_page(replace(comparison, budget={"clock": 1e9}), tmp_path / "p.html")
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "<script" not in html and "http://" not in html and "https://" not in html and "default-src 'none'" in html
    titles = re.findall(r"<h3>([^<]*) <span", html)
    assert titles == ["Time", "Cycles by station", "Energy by station", "Energy by action", "Error of the outputs"]
    figures = re.findall(r"<figure.*?</figure>", html, flags=re.DOTALL)
    assert figures[0].count("<rect") == 6 and "elsa · attend" in figures[1] and "vitcod · lines" in figures[2]
    assert figures[1].count("<rect") == 3 * 2 * sum(len(case.result.stations) for case in comparison.cases[:3])
    for case in comparison.cases:
        assert f"<td>{case.result.machine.name}</td>" in html and f"{case.result.cycles:,}" in html
    assert f"{float(comparison.cases[3].trace.provenance['output error']):.3f}" in figures[4]
    assert "clock 1e+09" in html and "here, its pairs, scipy" in html and "dense" not in figures[2]


def test_the_command_writes_a_page(tmp_path: Path) -> None:
    save_trace(synthetic_trace("runs", 0.25, heads=2, tokens=32), tmp_path / "t.safetensors")
    words = ["attention", "--designs", "elsa,a3", "--trace", tmp_path / "t.safetensors", "--page", tmp_path / "p.html"]
    CliRunner().invoke(command, [*map(str, words), "--no-measure"], catch_exceptions=False)
    html = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert "Error of the outputs" not in html and "This machine" not in html and "<h2>Masks" not in html
    assert "■" not in html and "Each machine as it is published." in html
