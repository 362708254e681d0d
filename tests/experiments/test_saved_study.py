"""Saved results, and comparison of new results with them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_studies import result

from thrifty.core.errors import UsageError
from thrifty.experiments.saved_study import compare_with_saved, save_study
from thrifty.experiments.study_result import StudyResult, read_result
from thrifty.experiments.study_table import table


def kept(found: StudyResult) -> dict[str, Any]:
    return json.loads(json.dumps(found.as_data()))


def test_a_saved_result_is_json_without_nan_and_a_table(tmp_path: Path) -> None:
    save_study(result(), tmp_path / "levels" / "cpu.json")
    text = (tmp_path / "levels" / "cpu.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert read_result(tmp_path / "levels" / "cpu.json") == kept(result())
    assert "| one" in (tmp_path / "levels" / "cpu.md").read_text()


def test_the_table_states_the_minimum_number_of_seeds() -> None:
    whole, partial, single = result(), result(), result(seeds=1)
    del partial.cells["two", 3], partial.cells["three", 3]
    assert "Means over 4 seeds with" in table(whole)
    assert "Means over 3 or more seeds with" in table(partial)
    assert "One seed, no intervals." in table(single)


def test_saving_refuses_existing_files_and_incomplete_results(tmp_path: Path) -> None:
    save_study(result(), tmp_path / "cpu.json")
    with pytest.raises(UsageError, match="exists already"):
        save_study(result(shift=1.0), tmp_path / "cpu.json")
    part = result()
    del part.cells["two", 3]
    with pytest.raises(UsageError, match="is incomplete"):
        save_study(part, tmp_path / "part.json")
    assert not (tmp_path / "part.json").exists()


def test_an_equal_result_agrees_and_times_are_not_compared() -> None:
    comparison = compare_with_saved(result(seconds=50.0), kept(result(seconds=1.0)))
    assert comparison.off == ()
    assert comparison.compared == 7  # two numbers of three cases, and the derived row


def test_means_outside_the_interval_are_named() -> None:
    half_width = result().summary["one"]["height"].half_width
    assert compare_with_saved(result(shift=half_width * 1.4), kept(result())).off == ()
    off = compare_with_saved(result(shift=half_width * 1.5), kept(result())).off
    assert len(off) == 3  # the derived difference is unchanged
    assert all("height is" in line for line in off)


def test_one_changed_mean_in_the_saved_file_is_found() -> None:
    changed = kept(result())
    changed["summary"]["two"]["height"]["mean"] += 0.1
    (line,) = compare_with_saved(result(), changed).off
    assert line.startswith("two: height is 2.015")


def test_fewer_new_seeds_widen_the_interval() -> None:
    shift = result().summary["one"]["height"].half_width * 1.5
    assert compare_with_saved(result(shift=shift), kept(result())).off != ()
    assert compare_with_saved(result(seeds=2, shift=shift), kept(result())).off == ()


@pytest.mark.parametrize(
    ("before", "now", "agrees"),
    [
        ((), (0,), False),  # never before, sometimes now: something broke
        ((0, 1, 2, 3), (), False),  # never finite before, finite now
        ((0, 1, 2, 3), (0, 1, 2, 3), True),
        ((0,), (), True),  # both occurred before
        ((0,), (0, 1, 2, 3), True),
    ],
)
def test_infinite_values_are_compared_too(before: tuple, now: tuple, agrees: bool) -> None:
    off = compare_with_saved(result(never=now), kept(result(never=before))).off
    assert (off == ()) is agrees


def test_results_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(UsageError, match="one seed"):
        compare_with_saved(result(), kept(result(seeds=1)))
    other = kept(result())
    other["definition"]["cases"]["one"]["level"] = 5.0
    with pytest.raises(UsageError, match="different settings"):
        compare_with_saved(result(), other)
    with pytest.raises(UsageError, match="belongs to study 'heights'"):
        compare_with_saved(result(), kept(result()) | {"study": "heights"})


def test_a_file_without_study_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu.json").write_text('{"benchmark": "adamw"}')
    with pytest.raises(UsageError, match="holds no study result"):
        read_result(tmp_path / "cpu.json")
    with pytest.raises(UsageError, match="no result"):
        read_result(tmp_path / "gpu.json")
