"""Study results saved under results/studies, and their comparison with a new result."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thrifty.core.atomic_files import AtomicFiles
from thrifty.core.errors import UsageError
from thrifty.core.old_names import rename_cases
from thrifty.experiments.study_result import StudyResult, kept_summary
from thrifty.experiments.study_summary import SeedMean
from thrifty.experiments.study_table import interval, shown, table
from thrifty.training.result_file import refuse_overwriting
from thrifty.training.run_folder import RunFolder

ROUNDING = 1e-3
"""Relative tolerance for means if all seeds of the saved result agree. Small differences are expected for two reasons.
Some studies train on Python's source files, which differ between patch versions, and processors round differently.
"""


@dataclass(frozen=True)
class StudyComparison:
    """Comparison of a new study result with a saved result: the number of compared means, and a sentence for each
    difference.
    """

    compared: int
    off: tuple[str, ...]


def refuse_existing_study(file: Path) -> None:
    """Raise UsageError if a saved result or its table already exists."""
    refuse_overwriting("results/studies/STUDY/DEVICE.json", file, file.with_suffix(".md"))


def save_study(result: StudyResult, file: Path) -> None:
    """Write a finished result as JSON, and its table as a Markdown file with the same name."""
    refuse_existing_study(file)
    if not result.finished:
        raise UsageError(
            f"{result.study.name} is incomplete", fix=f"measure the remaining cells: thrifty study {result.study.name}"
        )
    AtomicFiles().make_folders(file.parent)
    folder = RunFolder(file.parent)
    folder.write_json(file.stem, result.as_data())
    folder.write_text(f"{file.stem}.md", table(result))


def compare_with_saved(result: StudyResult, kept: Mapping[str, Any]) -> StudyComparison:
    """Compare each mean of a new result with the interval of the saved result.

    The interval covers the uncertainty of both means: saved half-width times sqrt(1 + saved seeds / new seeds). Times
    are not compared. Raises UsageError if the saved result belongs to another study or other cases, or has one seed.
    """
    if kept["study"] != result.study.name:
        raise UsageError(
            f"the saved result belongs to study {kept['study']!r}, not to {result.study.name!r}",
            fix=f"compare with results/studies/{result.study.name}/DEVICE.json",
        )
    if rename_cases(kept["definition"]["cases"]) != result.study.definition()["cases"]:
        raise UsageError(
            "the cases of the saved result have different settings", fix="compare with a result of this version"
        )
    old, new, off, compared = kept_summary(kept), result.summary, [], 0
    for label, numbers in new.items():
        for name, fresh in numbers.items():
            if result.study.quantities[name].of_machine:
                continue
            compared += 1
            before = old.get(label, {}).get(name)
            if before is None or not _agrees(fresh, before):
                off.append(_difference_text(label, name, fresh, before))
    return StudyComparison(compared, tuple(off))


def _agrees(fresh: SeedMean, kept: SeedMean) -> bool:
    if 0 < kept.never < kept.runs:  # both outcomes occur in the saved result
        return True
    if kept.never or fresh.never:
        return kept.never == kept.runs and fresh.never == fresh.runs
    if kept.runs == 1:
        raise UsageError(
            "the saved result has one seed and therefore no intervals", fix="save a result of several seeds"
        )
    within = max(kept.half_width_for(fresh.runs), ROUNDING * abs(kept.mean))
    return math.isfinite(fresh.mean) and abs(fresh.mean - kept.mean) <= within


def _difference_text(label: str, name: str, fresh: SeedMean, kept: SeedMean | None) -> str:
    if kept is None:
        return f"{label}: {name} is {shown(fresh.mean)}, missing in the saved result"
    return f"{label}: {name} is {interval(fresh)}, saved {interval(kept)}"
