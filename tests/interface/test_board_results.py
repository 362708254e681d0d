"""The board shows saved results by their own pages, and the measurements of each technique."""

import json
from pathlib import Path

import pytest

from thrifty.dashboard.board_site import BoardSite
from thrifty.experiments.past_results import OWN_RESULTS
from thrifty.interface.board import page_of, technique_evidence


@pytest.fixture
def site(tmp_path: Path) -> BoardSite:
    return BoardSite(tmp_path, [OWN_RESULTS], tuple, dict, page_of)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("comparisons/lion/cpu", "lion is worse than the baseline"),
        ("studies/lion_rate/cpu", "Lion&#39;s best rate is 3 to 10 times lower"),
        ("cluster/anchors", "Published measurements and their simulation"),
    ],
)
def test_saved_results_have_their_own_pages(site: BoardSite, name: str, words: str) -> None:
    page = site.respond("result", {"name": name}).body.decode()
    assert words in page and "<svg" in page.replace("data:image/svg+xml", "<svg")
    assert 'aria-label="Board"' in page and "Content-Security-Policy" not in page and "<script" not in page


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file", sorted(OWN_RESULTS.glob("studies/*/*.json")), ids=lambda file: file.parent.name)
def test_every_saved_study_has_a_page(file: Path) -> None:
    data = json.loads(file.read_bytes())
    assert data["study"] in (page_of(data) or "")


def test_other_results_have_no_page_of_their_own() -> None:
    assert page_of({"benchmark": "x"}) is None and page_of({"study": "absent", "cells": []}) is None


def test_evidence_names_verdicts_and_files(tmp_path: Path) -> None:
    measured = technique_evidence(["optimizers.lion", "losses.z_loss"], [OWN_RESULTS, tmp_path])
    assert measured["losses.z_loss"].chips == {"exactness": "different", "not measured": ""}
    lion = measured["optimizers.lion"]
    assert {"time", "memory", "exactness", "measured"} <= lion.chips.keys()
    assert str(OWN_RESULTS / "studies/lion_rate/cpu.json") in {source for _, source in lion.lines}
    assert not any(line.endswith(source) for line, source in lion.lines)
