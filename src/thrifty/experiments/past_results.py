"""Finished comparisons and studies in results/ and runs/, with the techniques that they measured."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from thrifty.comparing.loss_curves import steps_to_loss
from thrifty.comparing.saved_comparison import BASELINE, FILE, SCHEMA
from thrifty.core.old_names import rename_comparison

if TYPE_CHECKING:  # scipy takes a second to import
    from thrifty.comparing.variant_verdict import Word

PACKAGE = Path(__file__).parents[1]
OWN_RESULTS = next((each for each in (PACKAGE / "results", PACKAGE.parents[1] / "results") if each.is_dir()), PACKAGE)
"""Folder of Thrifty's own measurements: in the package if it was installed from a wheel, otherwise in the clone."""
OWN = ""
"""Objective of a comparison whose loss or data are a user's own objects: equal names would not mean equal losses."""
FOLDERS = (Path("results"), Path("runs"), OWN_RESULTS)


def shown_path(file: Path) -> str:
    """Return the path of a result for display: that of Thrifty's own results starts with "results/"."""
    own = OWN_RESULTS.parent.resolve()
    return str(file.resolve().relative_to(own)) if file.resolve().is_relative_to(own / "results") else str(file)


@dataclass(frozen=True)
class PastComparison:
    """A variant of a finished comparison that adds, removes or changes a technique."""

    technique: str
    role: Literal["added", "removed", "changed"]
    """Change of the technique in the variant. If the variant removed the technique, "better" counts against the
    technique.
    """
    others: tuple[str, ...]
    """Other techniques that the variant added, removed or changed. The verdict also covers these techniques."""
    alone: bool
    """True if the variant's recipe differs from the baseline's only in this technique."""
    verdict: "Word"
    sentence: str
    relative: float | None
    """Mean difference of held-out losses relative to the baseline's loss; negative if the variant's loss is lower than
    the baseline's.
    """
    equal: str
    """Budget that is equal for both variants: "time", "flops", "tokens" or "steps"."""
    step_time: float | None
    """Step time divided by the baseline's. `flops`, `peak_memory` and `time_to_quality` are such ratios, too."""
    flops: float | None
    """FLOPs of whole runs."""
    peak_memory: float | None
    time_to_quality: float | None
    """Time to the baseline's final loss; None if a run did not reach this loss."""
    steps_to_quality: float | None
    """Steps to the baseline's final loss, relative to the baseline's steps; None if a run did not reach this loss."""
    pairs: int
    device: str
    cpu: str
    objective: str
    is_pretrained: bool
    """True if the runs started from the weights of a model folder or of a passed module."""
    settings: Mapping[str, Any]
    """Settings of the technique in the variant, with the tuned learning rate. Empty if the variant removed it."""
    baseline_rate: float | None
    """Tuned learning rate of the baseline."""
    parameters: int
    """Number of parameters of the baseline's model."""
    tokens: float
    """Number of tokens or images of a baseline run."""
    steps: int
    file: Path
    variant: str
    has_learned: bool = True
    """False if no variant has a held-out loss below that of token or label frequencies."""

    @property
    def is_replacement(self) -> bool:
        """True if the variant removed only techniques of the same group, such as another optimizer."""
        group = self.technique.rpartition(".")[0]
        return bool(self.others) and all(other.rpartition(".")[0] == group for other in self.others)

    def in_words(self) -> str:
        """Return the verdict, the size of the runs and the machine on one line."""
        joined = f" {'in place of' if self.is_replacement else 'with'} {', '.join(self.others)}"
        others = joined if self.others else "" if self.alone else " with other settings"
        conditions = f"{self.parameters / 1e6:.2g}M parameters, {self.steps:,} steps, {self.cpu}, {self.device}"
        conditions += "" if self.has_learned else ", no variant better than frequencies"
        where = shown_path(self.file)
        return f"{self.role}{others}, equal {self.equal}: {self.sentence} ({conditions}): {where}"


def files_in(folders: Sequence[Path], *patterns: str) -> list[Path]:
    """Return the sorted files that match a pattern in any folder. A file in several folders is returned once, below the
    first of these folders.
    """
    files: dict[Path, Path] = {}
    for folder in folders:
        for pattern in patterns:
            for file in folder.glob(pattern):
                files.setdefault(file.resolve(), file)
    return sorted(files.values())


def past_comparisons(folders: Path | Sequence[Path] = FOLDERS) -> list[PastComparison]:
    """Return an entry for each variant of a finished comparison and each technique that the variant changes.

    Files that are not comparisons are skipped.
    """
    comparisons = []
    for data, file in _comparisons([folders] if isinstance(folders, Path) else folders):
        with suppress(KeyError, TypeError, ValueError):  # a damaged file, or a file of another version
            comparisons += _of_comparison(data, file)
    return comparisons


def _of_comparison(data: dict[str, Any], file: Path) -> list[PastComparison]:
    runs = [
        entry
        for entry in data["runs"]
        if entry["variant"] == BASELINE and "seed" in entry and entry["status"] == "finished"
    ]
    comparisons = []
    facts = runs[-1].get("judged_on", {}) if runs else {}
    entropy = facts.get("unigram_entropy") or facts.get("label_entropy")
    losses = [variant["held_out_loss"] for variant in data["outcome"]["variants"].values()]
    for label, roles in data["changes"].items() if runs else ():
        outcome, last = data["outcome"]["variants"][label], runs[-1]
        quality, verdict = outcome["time_to_quality"], outcome["verdict"]
        touched = [name for names in roles.values() for name in names]
        recipe, rates = data["definition"]["variants"][label], data.get("rates", {})
        model, own = recipe["model"], recipe.get("python", {})
        of_arm = {
            "objective": OWN if any(own.get(name) for name in ("loss", "data")) else recipe["objective"]["name"],
            "is_pretrained": model.get("weights") == "given"
            or (bool(model.get("folder")) and not model.get("reinitialize")),
            "baseline_rate": rates.get(BASELINE, {}).get("lr"),
            "verdict": verdict["verdict"],
            "sentence": verdict["sentence"],
            "relative": verdict["relative"],
            "pairs": verdict["planned"] - verdict["failed"],
            "equal": data["definition"]["protocol"]["equal"],
            **{name: outcome["ratios"][name] for name in ("step_time", "flops", "peak_memory")},
            "steps_to_quality": _relative_steps(data["runs"], label),
            "time_to_quality": quality["mean"] if quality["reached"] == quality["pairs"] else None,
            "cpu": data["environment"]["cpu"],
            **{name: last[name] for name in ("device", "parameters", "tokens", "steps")},
            "has_learned": not entropy or None in losses or min(losses) < entropy,
            "file": file,
            "variant": label,
        }
        for role, names in roles.items():
            for name in names:
                others = tuple(other for other in touched if other != name)
                alone = not others and _differs_by_techniques(data, label)
                rate = rates.get(label, {})
                tuned = rate.get("tuned", ["lr"])  # earlier comparisons tuned only "lr"
                settings = _settings(recipe["techniques"], name, rate.get("factor") or 1.0, tuned)
                comparisons.append(
                    PastComparison(technique=name, role=role, others=others, alone=alone, settings=settings, **of_arm)  # type: ignore[arg-type]
                )
    return comparisons


def _relative_steps(runs: Sequence[Mapping[str, Any]], label: str) -> float | None:
    """Return the mean of the steps that a variant needs to the final loss of the baseline with the same seed, relative
    to the baseline's steps.
    """
    finished = {
        (each["variant"], each["seed"]): each for each in runs if "seed" in each and each["status"] == "finished"
    }
    ratios = []
    for (variant, seed), run in finished.items():
        if variant == label and (base := finished.get((BASELINE, seed))):
            steps = steps_to_loss(run["curve"], base["held_out_loss"])
            ratios.append(None if steps is None else steps / base["steps"])
    return fmean(ratios) if ratios and None not in ratios else None  # type: ignore[arg-type]


def _settings(techniques: Mapping[str, Any], name: str, factor: float, tuned: Collection[str]) -> dict[str, Any]:
    """Return the settings of a technique in a variant, with its `tuned` learning rates multiplied by the factor."""
    settings: Any = techniques
    for part in name.split("."):
        settings = settings.get(part, {})
    return {key: value * factor if key in tuned and value is not None else value for key, value in settings.items()}


def _comparisons(folders: Sequence[Path]) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield finished comparisons with their files: `*/comparison.json` in run folders, JSON files in comparisons/."""
    for data, file in _kept(folders, f"*/{FILE}", "comparisons/**/*.json"):
        if isinstance(data, dict) and data.get("schema") == SCHEMA and data.get("status") == "finished":
            yield rename_comparison(data), file


def _kept(folders: Sequence[Path], *patterns: str) -> Iterator[tuple[Any, Path]]:
    """Yield the content and path of each JSON file in the folders. Unreadable files are skipped."""
    for file in files_in(folders, *patterns):
        with suppress(OSError, ValueError):
            yield json.loads(file.read_bytes()), file


def _differs_by_techniques(data: dict[str, Any], label: str) -> bool:
    recipes = data["definition"]["variants"]
    plain = [{key: value for key, value in recipes[one].items() if key != "techniques"} for one in (BASELINE, label)]
    return plain[0] == plain[1]


@dataclass(frozen=True)
class PastStudy:
    """A saved or finished study."""

    study: str
    about: str
    """Result of the study in one sentence."""
    techniques: frozenset[str]
    """Techniques that the study uses, including AdamW, schedules and clipping."""
    expected: int
    """Number of expectations, which were written before the study ran."""
    held: int
    """Number of expectations that hold."""
    sentences: tuple[str, ...]
    """Expectations with their verdicts."""
    cpu: str
    file: Path

    def in_words(self) -> str:
        """Return the result of the study on one line."""
        outcome = f"{self.held} of {self.expected} expectations hold"
        return f"study {self.study}: {self.about} {outcome} ({self.cpu}): {shown_path(self.file)}"


def past_studies(folders: Sequence[Path] = FOLDERS) -> list[PastStudy]:
    """Return the saved and finished studies in the folders. Files that are not studies are skipped."""
    past = []
    for data, file in _kept(folders, "*/study.json", "studies/*/*.json"):
        with suppress(KeyError, TypeError):
            name, expectations = data["study"], data["expectations"]
            held = sum(each["verdict"] == "holds" for each in expectations)
            about, cpu = data.get("about", ""), data["environment"]["cpu"]
            sentences = tuple(f"{each['verdict']}: {each['sentence']}" for each in expectations)
            past.append(PastStudy(name, about, _used_in(name), len(expectations), held, sentences, cpu, file))
    return past


@cache
def _used_in(study: str) -> frozenset[str]:
    file = resources.files("thrifty.experiments") / "studies" / f"{study}.py"
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    return frozenset(re.findall(r"^from thrifty\.techniques\.([\w.]+) import", source, re.MULTILINE))
