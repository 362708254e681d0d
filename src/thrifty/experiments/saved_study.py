"""Results that are kept under results/studies, and whether a fresh one agrees with them."""

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
"""Relative difference within which means count as equal where the seeds of the kept one all agree: other patch versions
of Python bring another text, and other processors other roundings."""


@dataclass(frozen=True)
class StudyComparison:
    """What a fresh result has of a kept one: how many numbers were compared, and a sentence for each that is off."""

    compared: int
    off: tuple[str, ...]


def refuse_existing_study(file: Path) -> None:
    """Raises UsageError where a kept result or its table would be overwritten."""
    refuse_overwriting("results/studies/STUDY/DEVICE.json", file, file.with_suffix(".md"))


def save_study(result: StudyResult, file: Path) -> None:
    """Writes a finished result as JSON, with its table in Markdown beside it."""
    refuse_existing_study(file)
    if not result.finished:
        raise UsageError(f"{result.study.name} is not measured completely", fix="keep it when all cells are there")
    AtomicFiles().make_folders(file.parent)
    folder = RunFolder(file.parent)
    folder.write_json(file.stem, result.as_data())
    folder.write_text(f"{file.stem}.md", table(result))


def compare_with_saved(result: StudyResult, kept: Mapping[str, Any]) -> StudyComparison:
    """Whether each mean of a fresh result lies within the interval of the kept one.

    The interval allows for the uncertainty of both means: the kept half-width times sqrt(1 + kept seeds / fresh
    seeds). Times are not compared. Raises UsageError where the kept result cannot be compared with.
    """
    if kept["study"] != result.study.name:
        raise UsageError(f"the kept result is of {kept['study']}, not of {result.study.name}")
    if rename_cases(kept["definition"]["cases"]) != result.study.definition()["cases"]:
        raise UsageError("the kept result has cases with other settings", fix="compare with a result of this version")
    old, new, off, compared = kept_summary(kept), result.summary, [], 0
    for label, numbers in new.items():
        for name, fresh in numbers.items():
            if result.study.quantities[name].of_machine:
                continue
            compared += 1
            before = old.get(label, {}).get(name)
            if before is None or not _agrees(fresh, before):
                off.append(_told(label, name, fresh, before))
    return StudyComparison(compared, tuple(off))


def _agrees(fresh: SeedMean, kept: SeedMean) -> bool:
    if 0 < kept.never < kept.runs:  # the kept result says that both outcomes happen
        return True
    if kept.never or fresh.never:
        return kept.never == kept.runs and fresh.never == fresh.runs
    if kept.runs == 1:
        raise UsageError("the kept result has one seed, so no intervals", fix="keep a result of several seeds")
    within = max(kept.half_width_for(fresh.runs), ROUNDING * abs(kept.mean))
    return math.isfinite(fresh.mean) and abs(fresh.mean - kept.mean) <= within


def _told(label: str, name: str, fresh: SeedMean, kept: SeedMean | None) -> str:
    if kept is None:
        return f"{label}: {name} is {shown(fresh.mean)}, and the kept result has none"
    return f"{label}: {name} is {interval(fresh)}, kept {interval(kept)}"
