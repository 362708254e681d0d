"""The page in a real browser without a network: the configured proxy does not exist."""

import re

import pytest
from drawn_pages import CHROMIUM, SCHEMES, drawn, probed

from thrifty.reporting.run_page import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH (Debian: apt-get install chromium)")


def test_every_chart_is_drawn_without_a_network(standard_page, tmp_path):
    dom = drawn(standard_page, tmp_path / "profile")
    figures = re.findall(r"<figure.*?</figure>", dom, flags=re.DOTALL)
    assert len(figures) == 5
    for figure in figures:
        assert "<svg" in figure and re.search(r'<g class="mark-line[^>]*>\s*<path[^>]* d="M', figure), figure[:300]
    assert "unigram entropy 5.94</text>" in figures[0] and "growth.stacking</text>" in figures[0]
    assert dom.count(">Copy</button>") == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_and_charts_follow_the_colour_scheme(standard_page, tmp_path, scheme):
    colours = "[getComputedStyle(document.body).backgroundColor, ...[...document.querySelectorAll("
    colours += "'#chart-loss .mark-line path')].map(path => getComputedStyle(path).stroke)].join(';')"
    dom = drawn(probed(standard_page, colours, tmp_path / "profile"), tmp_path / "profile", scheme)
    (title,) = re.findall(r"<title>probe:(.*?)</title>", dom)
    palette = SCHEMES[scheme][1]
    wanted = [tuple(int(palette[name][i : i + 2], 16) for i in (1, 3, 5)) for name in ("ground", "faint", "train")]
    assert title.split(";")[:3] == [f"rgb{colour}" for colour in wanted]


@pytest.mark.slow
def test_a_phone_needs_no_sideways_scrolling(write_run, tmp_path):
    page = write_report(write_run("a-run-with-a-rather-long-name" * 3))
    width = "document.documentElement.scrollWidth + '/' + innerWidth"
    dom = drawn(probed(page, width, tmp_path / "profile"), tmp_path / "profile", size="500,900")
    (title,) = re.findall(r"<title>probe:(.*?)</title>", dom)
    scrolled, inner = map(int, title.split("/"))
    assert scrolled <= inner


def test_hostile_text_runs_nothing(write_run, tmp_path):
    attack = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    records = [
        {"kind": "step", "step": 1, "loss": 3.0},
        {"kind": "step", "step": 2, "loss": 2.0},
        {"kind": "notice", "step": 1, "text": attack},
        {"kind": "change", "step": 1, "technique": attack, "reason": attack},
    ]
    page = write_report(write_run(records=records, summary=None, environment={"cpu": attack, "command": [attack]}))
    dom = drawn(page, tmp_path / "profile")
    assert "<title>kjv" in dom and not re.search(r"<(figure|td|pre)[^>]*>[^<]*<(img|script)", dom)
    assert '<g class="mark-line' in dom
