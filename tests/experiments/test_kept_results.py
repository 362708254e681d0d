"""Everything that is kept under results/ reads with the readers of today."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from thrifty import techniques
from thrifty.core.old_names import cases_today, comparison_today
from thrifty.dashboard.cached_files import CachedFiles
from thrifty.dashboard.saved_results import saved_results, tables
from thrifty.experiments import studies
from thrifty.experiments.past_results import evidence
from thrifty.experiments.study_result import kept_summary, read_result
from thrifty.recipes.recipe_toml import recipe_from_data, recipe_to_data

RESULTS = Path(__file__).parents[2] / "results"
COMPARISONS = sorted(RESULTS.glob("comparisons/*/*.json"))
STUDIES = sorted(RESULTS.glob("studies/*/*.json"))


def named(files: list[Path]) -> list[str]:
    return [file.parent.name for file in files]


@pytest.mark.parametrize("file", COMPARISONS, ids=named(COMPARISONS))
def test_the_recipes_of_a_comparison_are_recipes_of_today(file: Path) -> None:
    data: Mapping[str, Any] = comparison_today(json.loads(file.read_text()))
    for tables_of_arm in data["definition"]["arms"].values():
        again = recipe_to_data(recipe_from_data(tables_of_arm))
        for section, values in tables_of_arm.items():
            assert again[section] == values, section
    for roles in data["changes"].values():
        for names in roles.values():
            assert set(names) <= set(techniques.names())


def test_every_comparison_is_evidence() -> None:
    past = evidence(RESULTS)
    assert {entry.file for entry in past} == set(COMPARISONS)
    assert {entry.technique for entry in past} <= set(techniques.names())


@pytest.mark.parametrize("file", STUDIES, ids=named(STUDIES))
def test_a_study_can_be_compared_with_what_was_kept(file: Path) -> None:
    data = read_result(file)
    assert kept_summary(data).keys() == data["summary"].keys()
    assert cases_today(data["definition"]["cases"]) == studies.make(data["study"]).definition()["cases"]


def test_the_board_shows_every_file() -> None:
    shown = saved_results(RESULTS, CachedFiles())
    files = {file.relative_to(RESULTS).with_suffix("").as_posix() for file in RESULTS.glob("**/*.json")}
    assert {result.name for result in shown} == files
    assert all(tables(result.data) for result in shown)
