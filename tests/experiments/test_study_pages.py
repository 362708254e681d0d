"""Output of a study: the table, the plots, the page."""

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tiny_studies import result

from thrifty.core.errors import UsageError
from thrifty.experiments.study import StudyPlot
from thrifty.experiments.study_charts import caption, chart, points, titled_chart
from thrifty.experiments.study_page import render, write_page
from thrifty.experiments.study_summary import SeedMean
from thrifty.experiments.study_table import interval, shown, table
from thrifty.reporting.saved_chart import SavedChart


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (2.0, "2"), (0.02467, "0.02467"), (175.0, "175"), (461824.0, "461,824"), (1e11, "1e+11"),
     (-3.14159, "-3.142"), (1.2e-7, "1.2e-07"), (math.inf, "never")],
)  # fmt: skip
def test_numbers_are_shown_to_four_digits(value: float, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (SeedMean(2.2312, 0.01234, 3), "2.231 ± 0.012"),
        (SeedMean(16_812.0, 1234.0, 3), "16,812 ± 1,234"),
        (SeedMean(3e12, 2e10, 3), "3e+12 ± 2e+10"),
        (SeedMean(5.0, 0.0, 3), "5"),
        (SeedMean(2.5, math.nan, 1), "2.5"),
        (SeedMean(math.inf, math.nan, 3, never=3), "never"),
        (SeedMean(math.inf, math.nan, 3, never=2), "never in 2 of 3"),
    ],
)
def test_a_mean_is_shown_with_two_digits_of_its_interval(found: SeedMean, text: str) -> None:
    assert interval(found) == text


def test_the_table_has_all_cases_and_verdicts() -> None:
    text = table(result())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["one", "two", "three", "two over one"]
    assert len({row.count("|") for row in rows}) == 1
    assert "holds (in 4 of 4 seeds): two is higher than one" in text
    assert "does not hold (in 0 of 4 seeds): one is higher than two" in text
    assert "open: four is highest" in text
    assert "`thrifty study levels`" in text


def test_a_plot_has_finite_points_and_names_infinite_cases() -> None:
    height, never = result().study.plots
    drawn, left_out = points(result(), height)
    assert [row["x"] for row in drawn] == [1.0, 2.0, 3.0]
    assert all(row["low"] < row["y"] < row["high"] for row in drawn)
    assert left_out == []
    drawn, left_out = points(result(), never)
    assert [row["case"] for row in drawn] == ["one", "two"]
    assert left_out == ["three"]
    assert "Not drawn, because values are infinite: three" in caption(result(), never)


@pytest.mark.parametrize("x", ["never", "case"])
def test_a_plot_without_points_is_an_empty_chart(x: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thrifty.experiments.study_charts.points", lambda *_: ([], ["one", "two"]))
    assert SavedChart(titled_chart(result(), StudyPlot("none", "None", x=x, y="height"))).svg().startswith("<svg")


def test_a_derived_row_is_drawn_if_it_has_both_quantities() -> None:
    drawn, _ = points(result(), StudyPlot("both", "Both", x="never", y="height"))
    assert [row["case"] for row in drawn] == ["one", "two"]
    drawn, _ = points(result(), StudyPlot("all", "All", y="height"))
    assert [row["case"] for row in drawn] == ["one", "two", "three", "two over one"]


def test_line_colours_follow_the_order_of_cases() -> None:
    spec = chart(result(), StudyPlot("lines", "Lines", x="never", y="height", by="level")).to_dict()
    assert spec["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["1", "2"]


def test_images_match_their_format() -> None:
    plot = result().study.plots[0]
    assert SavedChart(titled_chart(result(), plot)).png().startswith(b"\x89PNG")
    assert ET.fromstring(SavedChart(titled_chart(result(), plot)).svg()).tag.endswith("svg")  # noqa: S314 (our own picture)


class Page(HTMLParser):
    """Addresses, number of scripts, and text of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.addresses: list[str] = []
        self.scripts = 0
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_self_contained_with_means_and_verdicts() -> None:
    page = Page(render(result()))
    assert page.scripts == 0
    assert all(address.startswith("#") for address in page.addresses)
    assert "var(--train)" in render(result()) and not re.search(r"(fill|stroke)=\"(#|white|black)", render(result()))
    assert "two is higher than one" in page.text
    assert "does not hold" in page.text
    assert "1.015 ± 0.021" in page.text
    assert "thrifty study levels" in page.text


def test_study_texts_are_escaped() -> None:
    assert "Height <by> level" not in render(result())
    assert re.search(r'label="Height &lt;by&gt; level', render(result()))


def test_images_never_follow_links(tmp_path: Path) -> None:
    measured, precious = result(), tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "study" / "plots").mkdir(parents=True)
    for plot in measured.study.plots:
        (tmp_path / "study" / "plots" / f"{plot.id}.png").symlink_to(precious)
    write_page(measured, tmp_path / "study")
    assert measured.study.plots and precious.read_text() == "precious"
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "plots").symlink_to(tmp_path / "study" / "plots")
    with pytest.raises(UsageError, match="plots' is a symbolic link"):
        write_page(measured, tmp_path / "linked")
