"""Scores of training examples, selection by scores, and a page for review."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import RenderableType

from thrifty.core.errors import UsageError
from thrifty.core.plain_values import build
from thrifty.core.score_file import ExampleScores, file_hash
from thrifty.experiments.scoring.score_selection import LabelCount, changed_settings, format_option
from thrifty.interface.recipe_arguments import layers_of
from thrifty.recipes.recipe_layers import RecipeLayers
from thrifty.recipes.recipe_toml import write_recipe
from thrifty.reporting.number_format import duration, scaled, significant
from thrifty.reporting.printed_result import PrintedResult, lines
from thrifty.techniques.data_selection.prune import PrunedExamples


@dataclass(frozen=True, repr=False)
class ScoredExamples(PrintedResult):
    """Scores of all training examples, and the score file."""

    file: Path
    sha256: str
    scores: ExampleScores
    source: str

    def as_dict(self) -> dict[str, Any]:
        scores, facts = self.scores, self.scores.facts
        about = {"file": str(self.file), "sha256": self.sha256, "method": facts.method, "examples": len(scores)}
        cost = {"steps": facts.steps, "seeds": facts.seeds, "flops": facts.flops, "seconds": facts.seconds}
        return {**about, "runs": len(scores.runs), **cost}

    def __rich__(self) -> RenderableType:
        scores, facts = self.scores, self.scores.facts
        runs = f"{len(scores.runs)} run{'s' if len(scores.runs) > 1 else ''}"
        trained = f" of {facts.steps:,} steps" if facts.steps else ""
        quantiles = [significant(float(scores.scores.double().quantile(at))) for at in (0, 0.25, 0.5, 0.75, 1)]
        return lines(
            f"{len(scores):,} examples by {facts.method}, {runs}{trained}; higher is harder",
            f"cost       {scaled(facts.flops, 'FLOP')}, {duration(facts.seconds)}",
            f"scores     minimum {quantiles[0]}, quartiles {', '.join(quantiles[1:4])}, maximum {quantiles[4]}",
            f"file       {self.file}",
            f"sha256     {self.sha256}",
            f"inspect    thrifty data look {self.source} --scores {self.file}",
            f"prune      thrifty data prune {self.file} --keep-fraction 0.5",
        )


@dataclass(frozen=True, repr=False)
class SelectedExamples(PrintedResult):
    """Result of example selection: counts per label, and the technique that trains on the kept examples."""

    technique: PrunedExamples
    labels: tuple[LabelCount, ...]
    examples: int
    kept: int
    is_labelled: bool
    written: Path | None = None
    """File of the written recipe."""

    def as_dict(self) -> dict[str, Any]:
        counts = {"examples": self.examples, "kept": self.kept, "labels": [row._asdict() for row in self.labels]}
        return {**counts, "technique": self.technique.name, "settings": changed_settings(self.technique)}

    def __rich__(self) -> RenderableType:
        rows = [*self.labels, *([LabelCount("all", self.examples, self.kept)] if self.is_labelled else [])]
        printed = [f"{'':24}{'all':>10}{'kept':>10}{'left out':>10}"]
        printed += [
            f"{row.label or 'examples':<24}{row.there:>10,}{row.kept:>10,}{row.there - row.kept:>10,}" for row in rows
        ]
        if self.technique.drop_hardest:
            hardest = round(self.technique.drop_hardest * self.examples)
            printed.append(f"hardest examples dropped: {hardest:,}")
        tables = {"techniques": {"data_selection": {"prune": changed_settings(self.technique)}}}
        printed += ["", "on the command line:", f"  --with {format_option(self.technique)}", "", "in a recipe:"]
        printed += [f"  {line}" for line in tomli_w.dumps(tables).splitlines()]
        return lines(*printed, *([f"\nwritten: thrifty train {self.written}"] if self.written else []))


@dataclass(frozen=True, repr=False)
class ReviewPage(PrintedResult):
    """HTML page of examples for review."""

    page: Path
    scores: ExampleScores
    doubted: tuple[int, ...]
    """Indices of likely label errors, most likely first."""

    def as_dict(self) -> dict[str, Any]:
        counts = {"examples": len(self.scores), "doubted": len(self.doubted)}
        return {"page": str(self.page), **counts, "first": list(self.doubted[:100])}

    def __rich__(self) -> RenderableType:
        printed = [f"{self.page}: {len(self.scores):,} examples by {self.scores.facts.method}"]
        if self.scores.guesses is not None:
            count = f"{len(self.doubted):,}"
            printed.append(f"the runs predict another label for {count} of them, the most confident first")
        return lines(*printed)


def choice_by(scores: Path, **settings: Any) -> PrunedExamples:
    """Return the technique that trains on a selection by a score file. A setting of None keeps its default."""
    chosen = {name: value for name, value in settings.items() if value is not None}
    return build(PrunedExamples, {"scores": str(scores.resolve()), "sha256": file_hash(scores), **chosen}, "prune")


def write_pruned(target: Path, recipe: str | None, table: ExampleScores, chosen: PrunedExamples) -> None:
    """Write a recipe (by default the scored recipe) with a selection. Raise UsageError if the file exists."""
    if target.exists():
        raise UsageError(f"'{target}' exists already", fix="--write other.toml")
    scored = RecipeLayers().override("recipe", table.facts.recipe)
    layers = scored if recipe is None else layers_of(recipe)
    name = f"{layers.values().get('name', 'run')}-pruned"
    layers.override("prune", {"name": name, "techniques": {"data_selection": {"prune": changed_settings(chosen)}}})
    target.write_text(write_recipe(layers.recipe()), encoding="utf-8")
