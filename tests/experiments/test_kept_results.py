"""Results that the repository keeps: today's readers read all of them."""

import json
from pathlib import Path

import pytest

from thrifty import techniques
from thrifty.comparing.comparison_protocol import SCHEMA
from thrifty.experiments.past_results import evidence
from thrifty.experiments.study_page import render
from thrifty.experiments.study_result import read_result
from thrifty.reporting import comparison_page

RESULTS = Path(__file__).parents[2] / "results"
STUDIES = sorted(RESULTS.glob("studies/*/*.json"))
COMPARISONS = sorted(RESULTS.glob("comparisons/**/*.json"))


def test_there_are_results() -> None:
    assert len(STUDIES) >= 28 and len(COMPARISONS) >= 5


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_study_is_read_judged_and_shown(path: Path) -> None:
    result = read_result(path)
    assert result.study.name in render(result)
    assert len(result.verdicts) == len(json.loads(path.read_bytes())["expectations"])


def test_every_comparison_is_evidence_of_a_technique_of_today() -> None:
    found = evidence(RESULTS)
    assert {one.file for one in found} == set(COMPARISONS)
    assert {one.technique for one in found} <= set(techniques.names())
    for path in COMPARISONS:
        data = json.loads(path.read_bytes())
        assert data["schema"] == SCHEMA and data["name"] in comparison_page.render(data)
