"""Results saved in the repository are readable by today's code."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from thrifty import techniques
from thrifty.comparing.saved_comparison import SCHEMA
from thrifty.core.old_names import rename_cases
from thrifty.experiments import studies
from thrifty.experiments.past_results import past_comparisons
from thrifty.experiments.study_result import kept_summary, read_result
from thrifty.experiments.study_summary import judge_expectations, summarize
from thrifty.reporting import comparison_page

RESULTS = Path(__file__).parents[2] / "results"
STUDIES = sorted(RESULTS.glob("studies/*/*.json"))
COMPARISONS = sorted(RESULTS.glob("comparisons/**/*.json"))


def test_results_exist() -> None:
    assert len(STUDIES) >= 28 and len(COMPARISONS) >= 5


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_saved_studies_have_the_same_summary_and_verdicts(path: Path) -> None:
    data = read_result(path)
    study = studies.make(data["study"])
    assert study.definition()["cases"] == rename_cases(data["definition"]["cases"])
    numbers = {(cell["case"], cell["seed"]): cell["numbers"] for cell in data["cells"]}
    measured = {at: {k: math.inf if v is None else v for k, v in cell.items()} for at, cell in numbers.items()}
    summary = summarize(study, measured)
    for label, row in kept_summary(data).items():
        for name, kept in row.items():
            assert summary[label][name].mean == pytest.approx(kept.mean, rel=1e-9, nan_ok=True), (label, name)
    assert [asdict(verdict) for verdict in judge_expectations(study, measured)] == data["expectations"]


def test_every_comparison_is_evidence_of_a_known_technique() -> None:
    found = past_comparisons(RESULTS)
    assert {one.file for one in found} == set(COMPARISONS)
    assert {one.technique for one in found} <= set(techniques.names())
    for path in COMPARISONS:
        data = json.loads(path.read_bytes())
        assert data["schema"] == SCHEMA and data["name"] in comparison_page.render(data)
