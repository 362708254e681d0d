"""Notebook view of a run and of a study: self-contained HTML."""

import base64
import re
from html.parser import HTMLParser

import rich.console
import rich.jupyter
from tiny_studies import result

from thrifty.experiments.study_page import study_html
from thrifty.experiments.study_result import StudyResult
from thrifty.reporting.notebook_view import read_run
from thrifty.reporting.printed_result import ResultTable


class NotebookReader(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words = ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words += data


def test_a_run_shows_verdict_key_figures_and_two_images(write_run):
    reader = NotebookReader(read_run(write_run(steps=60))._repr_html_())
    assert "kjv: finished" in reader.words and "below the unigram entropy" in reader.words and "276 MB" in reader.words
    pictures = [about for tag, about in reader.tags if tag == "img"]
    assert [about["alt"].partition(".")[0] for about in pictures] == ["Loss", "Memory"]
    for about in pictures:
        kind, _, content = about["src"].partition(",")
        assert kind == "data:image/png;base64" and base64.b64decode(content).startswith(b"\x89PNG")


def test_a_run_without_steps_has_no_images(write_run):
    reader = NotebookReader(read_run(write_run(records=[], summary=None))._repr_html_())
    assert "kjv: not started" in reader.words and not any(tag == "img" for tag, _ in reader.tags)


def test_the_view_has_no_scripts_and_escapes_text(write_run):
    attack = "<script>alert(1)</script><img src='http://evil.example/x'>"
    html = read_run(write_run(steps=30, summary={"status": attack, "loss_in": attack, "steps": 30}))._repr_html_()
    tags = NotebookReader(html).tags
    assert not any(tag == "script" for tag, _ in tags) and "&lt;script&gt;" in html
    addresses = [value for _, about in tags for name, value in about.items() if name in ("src", "href")]
    assert all(address.startswith("data:image/png;base64,") for address in addresses)


def test_a_study_shows_expectations_and_means():
    measured = result()
    assert StudyResult._repr_html_ is study_html
    reader = NotebookReader(study_html(measured))
    assert measured.study.name in reader.words and measured.study.about in reader.words
    assert all(case in reader.words for case in measured.study.cases) and re.search(r"\d ± \d", reader.words)


def test_a_notebook_shows_a_result_once(monkeypatch):
    shown = []
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setattr(rich.jupyter, "display", lambda *parts: shown.append(parts))
    rich.console.Console().print("detected")
    assert len(shown) == 1, "rich displays by itself in a notebook"
    table = ResultTable(("trial", "loss"), [("one", "2.5")])
    assert "2.5" in repr(table) and "2.5" in table._repr_html_() and len(shown) == 1
