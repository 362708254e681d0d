"""What was measured of techniques: comparisons and studies that took place, in results/ and runs/."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from thrifty.comparing.comparison_protocol import FILE, SCHEMA
from thrifty.comparing.variants import BASELINE
from thrifty.core.old_names import rename_comparison
from thrifty.experiments import studies

if TYPE_CHECKING:  # scipy takes a second to import
    from thrifty.comparing.variant_verdict import Word

FOLDERS = (Path("results"), Path("runs"))


@dataclass(frozen=True)
class PastComparison:
    """One arm of a finished comparison in which a technique took part."""

    technique: str
    role: Literal["added", "removed", "changed"]
    """What the arm did with it; a "better" of an arm that removed it speaks against it."""
    others: tuple[str, ...]
    """Techniques that the arm added, removed or changed as well, so that the verdict is not of this one alone."""
    alone: bool
    """Whether nothing else of the recipe differs, techniques or not."""
    verdict: "Word"
    sentence: str
    relative: float | None
    """Mean difference of held-out losses as a share of the baseline's; negative where the arm's is lower."""
    equal: str
    """What was equal: "time", "flops", "tokens" or "steps"."""
    step_time: float | None
    """Ratio to the baseline's, as are these."""
    flops: float | None
    """Over whole runs."""
    peak_memory: float | None
    time_to_quality: float | None
    """Time to the loss that the baseline ended at; None where that was not always reached."""
    pairs: int
    device: str
    cpu: str
    parameters: int
    """Of the baseline's model."""
    tokens: float
    """That the baseline went through, in what its data is counted in."""
    steps: int
    file: Path
    arm: str

    def in_words(self) -> str:
        """One line: what was found, how large the runs were, on what."""
        beside = f" with {', '.join(self.others)}" if self.others else "" if self.alone else " with other settings"
        size = f"{self.parameters / 1e6:.2g}M parameters, {self.steps:,} steps"
        return (
            f"{self.role}{beside}, equal {self.equal}: {self.sentence} ({size}, {self.cpu}, {self.device}): {self.file}"
        )


def evidence(folders: Path | Sequence[Path] = FOLDERS) -> list[PastComparison]:
    """Of every technique by which an arm of a finished comparison differs from its baseline, in all comparisons found
    below the folders: an entry for each technique and arm. Files that are no comparison are passed over."""
    comparisons = []
    for data, file in _comparisons([folders] if isinstance(folders, Path) else folders):
        with suppress(KeyError, TypeError, ValueError):  # of another version, or damaged
            comparisons += _of_comparison(data, file)
    return comparisons


def _of_comparison(data: dict[str, Any], file: Path) -> list[PastComparison]:
    runs = [
        entry
        for entry in data["runs"]
        if entry["arm"] == BASELINE and "seed" in entry and entry["status"] == "finished"
    ]
    comparisons = []
    for label, roles in data["changes"].items() if runs else ():
        arm, last = data["outcome"]["arms"][label], runs[-1]
        quality, verdict = arm["time_to_quality"], arm["verdict"]
        touched = [name for names in roles.values() for name in names]
        of_arm = {
            "verdict": verdict["verdict"],
            "sentence": verdict["sentence"],
            "relative": verdict["relative"],
            "pairs": verdict["planned"] - verdict["failed"],
            "equal": data["definition"]["terms"]["equal"],
            **{name: arm["ratios"][name] for name in ("step_time", "flops", "peak_memory")},
            "time_to_quality": quality["mean"] if quality["reached"] == quality["pairs"] else None,
            "cpu": data["environment"]["cpu"],
            **{name: last[name] for name in ("device", "parameters", "tokens", "steps")},
            "file": file,
            "arm": label,
        }
        for role, names in roles.items():
            for name in names:
                others = tuple(other for other in touched if other != name)
                alone = not others and _differs_by_techniques(data, label)
                comparisons.append(PastComparison(technique=name, role=role, others=others, alone=alone, **of_arm))  # type: ignore[arg-type]
    return comparisons


def _comparisons(folders: Sequence[Path]) -> Iterator[tuple[dict[str, Any], Path]]:
    """Finished ones, with their files: in a folder of runs comparison.json one level down, elsewhere any .json."""
    for data, file in _kept(folders, f"*/{FILE}", "comparisons/**/*.json"):
        if isinstance(data, dict) and data.get("schema") == SCHEMA and data.get("status") == "finished":
            yield rename_comparison(data), file


def _kept(folders: Sequence[Path], *patterns: str) -> Iterator[tuple[Any, Path]]:
    """Yield the content and path of each JSON file below the folders; unreadable files are skipped."""
    for file in sorted({file for folder in folders for pattern in patterns for file in folder.glob(pattern)}):
        with suppress(OSError, ValueError):
            yield json.loads(file.read_bytes()), file


def _differs_by_techniques(data: dict[str, Any], label: str) -> bool:
    recipes = data["definition"]["arms"]
    plain = [{key: value for key, value in recipes[one].items() if key != "techniques"} for one in (BASELINE, label)]
    return plain[0] == plain[1]


@dataclass(frozen=True)
class PastStudy:
    """A kept or finished study of which a technique is part."""

    study: str
    expected: int
    """Statements that were made of it before, and how many of them hold."""
    held: int
    cpu: str
    file: Path

    def in_words(self) -> str:
        return f"study {self.study}: {self.held} of {self.expected} expectations hold ({self.cpu}): {self.file}"


def study_results(technique: str, folders: Sequence[Path] = FOLDERS) -> list[PastStudy]:
    """Results of studies whose file names the technique, AdamW, schedules and clipping too where it uses those."""
    past = []
    for data, file in _kept(folders, "*/study.json", "studies/*/*.json"):
        try:
            study, expectations, cpu = data["study"], data["expectations"], data["environment"]["cpu"]
        except (KeyError, TypeError):
            continue
        if technique in _used_in(study):
            confirmed = sum(each["verdict"] == "holds" for each in expectations)
            past.append(PastStudy(study, len(expectations), confirmed, cpu, file))
    return past


@cache
def _used_in(study: str) -> frozenset[str]:
    """The techniques that a study's file imports."""
    if study not in studies.names():
        return frozenset()
    source = resources.files(studies).joinpath(f"{study}.py").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^from thrifty\.techniques\.([\w.]+) import", source, re.MULTILINE))
