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


def test_a_saved_comparison_is_described_by_its_protocol(site: BoardSite) -> None:
    page = site.respond("studies", {}).body.decode()
    assert "A baseline and one variant at equal steps, 7 paired seeds, each at the best of 3 learning rates." in page
    assert "technique_table" not in page and ">Page</th>" not in page


@pytest.mark.parametrize(("name", "charts"), [("float8-4096-1024-4096", 1), ("plan-others-cpu", 2), ("waiting-cpu", 6)])
def test_benchmarks_have_charts(site: BoardSite, name: str, charts: int) -> None:
    page = site.respond("result", {"name": f"benchmarks/{name}"}).body.decode()
    assert page.count("<figure") == charts and page.count("<svg") == 2 * charts and "<details><summary>" in page


ROUNDS = [
    {"round": number, "density": 0.8**number, "runs": {"ticket": {"held_out_loss": loss}}}
    for number, loss in enumerate((3.0, 2.99, 3.01, 3.2))
]
NEGATIVE = [
    {"round": number, "density": 0.8**number, "runs": {"ticket": {"held_out_loss": loss}}}
    for number, loss in enumerate((-3.0, -3.01, -2.99, -2.8))
]
TRIALS = [
    {
        "run": f"trial-{each}",
        "settings": {"data.batch": each},
        "rungs": [{"fraction": 1.0, "judged": each, "rank": each}],
    }
    for each in (1, 2)
]
SWEEP = {"definition": {"over": {"data.batch": [1, 2]}, "recipe": {}}, "trials": TRIALS}


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("lottery", {"lottery": {}, "rounds": ROUNDS, "status": "finished"}, "A ticket with 64.0 % of the weights"),
        ("lottery", {"lottery": {}, "rounds": NEGATIVE, "status": "finished"}, "A ticket with 64.0 % of the weights"),
        ("lottery", {"lottery": {}}, "The lottery is running"),
        ("sweep", {**SWEEP, "status": "finished", "best": "trial-1"}, "Best: data.batch 1"),
        ("sweep", SWEEP, "The sweep is running"),
    ],
)
def test_sweeps_and_lotteries_have_their_pages(
    site: BoardSite, tmp_path: Path, kind: str, content: dict[str, object], words: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / f"{kind}.json").write_text(json.dumps(content))
    page = site.respond("folder", {"name": "mine"}).body.decode()
    assert words in page and f"Thrifty {kind}" in page and "mine <span" in page
    assert ("<svg" in page) == (kind == "sweep" or "rounds" in content)


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
    assert "results/studies/lion_rate/cpu.json" in {source for _, source in lion.lines}
    assert not any(line.endswith(source) for line, source in lion.lines)
