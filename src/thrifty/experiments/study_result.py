"""Study result as stored in `study.json`, in runs/NAME during the study and in results/ after the study is saved.

    study  about  definition  environment  seconds
    cells            values of every run: case, seed, numbers, seconds
    summary          means over seeds and half-widths of their 95 % intervals
    expectations     expected statements and their verdicts

JSON has no infinity: null stands for an infinite value ("never").
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thrifty.core.errors import IntegrityError, UsageError
from thrifty.core.old_names import rename_cases
from thrifty.experiments.study import Numbers, Study
from thrifty.experiments.study_summary import (
    ExpectationVerdict,
    Measured,
    SeedMean,
    Summary,
    judge_expectations,
    summarize,
)

MACHINE = ("cpu", "python", "torch")
"""Environment entries that must be equal for all cells of one result."""

_KEPT = "pass a saved result, such as results/studies/STUDY/DEVICE.json"


@dataclass(frozen=True)
class StudyCell:
    numbers: Numbers
    seconds: float


@dataclass
class StudyResult:
    study: Study
    environment: Mapping[str, Any]
    cells: dict[tuple[str, int], StudyCell] = field(default_factory=dict)

    @property
    def measured(self) -> Measured:
        return {place: cell.numbers for place, cell in self.cells.items()}

    @property
    def finished(self) -> bool:
        """True if every case was measured for every seed."""
        return all((label, seed) in self.cells for label in self.study.cases for seed in range(self.study.seeds))

    @property
    def summary(self) -> Summary:
        return summarize(self.study, self.measured)

    @property
    def verdicts(self) -> list[ExpectationVerdict]:
        return judge_expectations(self.study, self.measured)

    def as_data(self) -> dict[str, Any]:
        """Return plain JSON data. It does not depend on the order in which cells were measured."""
        order = {label: place for place, label in enumerate(self.study.cases)}
        places = sorted(self.cells, key=lambda place: (order[place[0]], place[1]))
        return {
            "study": self.study.name,
            "about": self.study.about,
            "definition": self.study.definition(),
            "environment": dict(self.environment),
            "seconds": round(sum(cell.seconds for cell in self.cells.values()), 1),
            "cells": [{"case": case, "seed": seed, **_plain(asdict(self.cells[case, seed]))} for case, seed in places],
            "summary": {
                label: {name: _plain(asdict(estimate)) for name, estimate in numbers.items()}
                for label, numbers in self.summary.items()
            },
            "expectations": [asdict(verdict) for verdict in self.verdicts],
        }

    def take_over(self, data: Mapping[str, Any]) -> None:
        """Load the cells of an interrupted study. Raises UsageError if the study's definition or the machine has
        changed.
        """
        if changes := self._changed_since(data):
            raise UsageError(
                f"{self.study.name} has changed since its first cells were measured: {'; '.join(changes)}",
                fix="measure the study under another name: --name NAME",
            )
        self.add_saved(data)

    def add_saved(self, data: Mapping[str, Any]) -> None:
        """Load the environment and the cells of a saved result."""
        self.environment = data["environment"]
        for cell in data["cells"]:
            numbers = {name: _number(value) for name, value in cell["numbers"].items()}
            self.cells[cell["case"], cell["seed"]] = StudyCell(numbers, cell["seconds"])

    def _changed_since(self, data: Mapping[str, Any]) -> list[str]:
        definition, environment = self.study.definition(), data["environment"]
        before = {**data["definition"], "cases": rename_cases(data["definition"]["cases"])}
        changes = [f"the {part} changed" for part in definition if definition[part] != before.get(part)]
        for fact in MACHINE:
            if environment.get(fact) != self.environment.get(fact):
                changes.append(f"{fact} was {environment.get(fact)} and is {self.environment.get(fact)}")
        return changes


def read_result(path: Path) -> dict[str, Any]:
    """Read the JSON file of a study. Raises UsageError if the file is missing or is not a study result, and
    IntegrityError if the file is damaged.
    """
    if not path.is_file():
        raise UsageError(f"there is no result '{path}'", fix=_KEPT)
    try:
        data = json.loads(path.read_bytes())
    except ValueError as error:
        raise IntegrityError(f"'{path}' is damaged: {error}", "restore it from a copy") from error
    wanted = {"study", "definition", "environment", "cells", "summary"}
    if not isinstance(data, dict) or wanted - data.keys():
        raise UsageError(f"'{path}' holds no study result", fix=_KEPT)
    return data


def kept_summary(data: Mapping[str, Any]) -> Summary:
    """Return the summary of a saved result."""
    return {
        label: {
            name: SeedMean(
                _number(estimate["mean"]),
                math.nan if estimate["half_width"] is None else estimate["half_width"],
                estimate["runs"],
                estimate["never"],
            )
            for name, estimate in numbers.items()
        }
        for label, numbers in data["summary"].items()
    }


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return {name: _plain(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value
