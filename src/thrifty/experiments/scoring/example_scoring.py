"""Scoring of training examples: several short runs of a recipe each score every example, and the scores are averaged.

The scores of each finished run are cached. An interrupted scoring, or a scoring with more runs, computes only the
missing scores.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from thrifty import __version__
from thrifty.composition.explain import count
from thrifty.core.errors import ThriftyError, UsageError, refuse_unknown
from thrifty.core.recipe import Recipe
from thrifty.core.run_relative_settings import in_steps
from thrifty.core.score_file import ExampleScores, ScoreProvenance, average_scores
from thrifty.data.data_cache import file_sha256
from thrifty.data.epoch_sampler import EpochSource
from thrifty.experiments.scoring.score_cache import cache_path, read_cached_scores, write_scores
from thrifty.experiments.scoring.scoring_methods import METHODS
from thrifty.experiments.scoring.scoring_run import Say, scored_by, trained_and_scored
from thrifty.recipes.recipe_toml import recipe_to_data
from thrifty.techniques.data_selection.prune import PrunedExamples
from thrifty.training.run_setup import PreparedRun, prepare_run

RUNS = 5
NOT_SCORED_BY = ("name", "about", "seed", "evaluation", "checkpoints")
"""Sections of a recipe that do not affect the scores. The seed is also excluded, because the cache key of each run
contains it separately.
"""


@dataclass(frozen=True)
class ScoringSettings:
    by: str = "el2n"
    """Name of a method in `scoring_methods.METHODS`."""
    runs: int | None = None
    """Number of runs, with consecutive seeds that start at the recipe's seed. The default is 5, or 1 if nothing is
    trained.
    """
    steps: int | float = 0.2
    """Length of each run in steps, or as a float fraction of the recipe's budget. 0 scores the initialized model."""
    embed_with: str = ""
    """For "prototype": a run folder or a Hugging Face folder. Its model computes the embeddings."""
    clusters: int | None = None
    """For "prototype": number of k-means clusters; by default the number of labels."""

    def __post_init__(self) -> None:
        refuse_unknown("examples cannot be scored by", self.by, METHODS)
        if self.by != "prototype" and (self.embed_with or self.clusters is not None):
            what = "an embedding model" if self.embed_with else "a number of clusters"
            raise UsageError(f"{what} requires the method prototype, not {self.by!r}", fix="--method prototype")
        if self.runs is not None and self.runs < 1:
            raise UsageError(f"runs is {self.runs}, but must be at least 1", fix="--runs 5")
        if not self.trained and self.count > 1:
            what = "with an embedding model" if self.embed_with else f"by {self.by}"
            raise UsageError(f"{self.count} runs {what} give equal scores, since nothing is trained", fix="--runs 1")
        if self.steps < 0 or (isinstance(self.steps, float) and self.steps > 1):
            raise UsageError(
                f"steps is '{self.steps}', but must be an integer from 0, or a fraction from 0.0 to 1.0",
                fix="set steps, such as 100, or a fraction up to 1.0",
            )
        if self.by == "forgetting" and not self.steps:
            raise UsageError("the method forgetting requires at least 1 step, not 0", fix="--steps 0.2")

    @property
    def trained(self) -> bool:
        return METHODS[self.by].trained and not self.embed_with

    @property
    def count(self) -> int:
        return (RUNS if self.trained else 1) if self.runs is None else self.runs


def score(
    recipe: Recipe,
    scoring: ScoringSettings,
    out: Path,
    *,
    say: Say = lambda text: None,
) -> tuple[ExampleScores, str]:
    """Score every training example of a recipe. Write the score file; return the scores and the sha256 of the file.

    Scores of a user's own model are not cached. Raises UsageError if the file exists, or if the data or the objective
    do not support the method. Raises ThriftyError if scores of a run are not finite.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("scoring runs in one process", fix="start the command without torchrun")
    if out.exists():
        raise UsageError(f"'{out}' exists already", fix="choose another --out; or remove the file")
    unpruned = tuple(each for each in recipe.techniques if not isinstance(each, PrunedExamples))
    scores = _ScoringRuns(replace(recipe, techniques=unpruned), scoring, say).average()
    return scores, write_scores(out, scores)


@dataclass
class _ScoringRuns:
    recipe: Recipe
    scoring: ScoringSettings
    say: Say

    def average(self) -> ExampleScores:
        first = prepare_run(self.recipe)
        total = first.run.steps
        self.steps = in_steps(self.scoring.steps, total) if self.scoring.trained else 0
        if self.steps > total:
            raise UsageError(f"{self.steps} steps are more than the recipe's {total}", fix="--steps 1.0")
        self.require_scorable(first)
        self.facts = self.provenance(first, total)
        self.step_flops = count(first.run, first.run.techniques)[1].flops if self.steps else 0.0
        parts = []
        for number in range(self.scoring.count):
            seed = self.recipe.seed + number
            place = (
                cache_path(self.facts, self.clusters, seed)
                if self.steps and self.recipe.objects.model is None
                else None
            )
            part = read_cached_scores(place) if place else None
            how = "from the cache" if part else f"{self.steps} steps" if self.scoring.trained else self.scoring.by
            self.say(f"run {number + 1} of {self.scoring.count} (seed {seed}): {how}")
            if part is None:
                seeded = replace(self.recipe, seed=seed)
                part = self.score_one_run(first if number == 0 else prepare_run(seeded, total, quiet=True), seed)
                if place:
                    write_scores(place, part)
            parts.append(part)
        return average_scores(parts)

    def score_one_run(self, prepared: PreparedRun, seed: int) -> ExampleScores:
        began, by = time.monotonic(), self.scoring.by
        if self.scoring.trained:
            scores, sight = trained_and_scored(prepared, by, self.steps, seed, self.clusters, self.say)
        else:
            folder = Path(self.scoring.embed_with) if self.scoring.embed_with else None
            scores, sight = scored_by(folder, self.recipe, prepared, by, self.clusters)
        if not scores.isfinite().all():
            raise ThriftyError(
                f"the run with seed {seed} yields {int((~scores.isfinite()).sum())} scores that are not finite",
                fix="lower the learning rate of the recipe; or score after fewer steps: --steps 0.1",
            )
        flops, seconds = self.step_flops * self.steps + sight.flops, time.monotonic() - began
        facts = replace(self.facts, seeds=(seed,), flops=flops, seconds=seconds)
        return ExampleScores(scores, scores[None], facts, prepared.data.train.example_index().labels, sight.guesses)

    def require_scorable(self, prepared: PreparedRun) -> None:
        """Raise UsageError if the method cannot score the examples of the recipe."""
        method, objective, data = METHODS[self.scoring.by], prepared.run.plain.objective, prepared.data
        data.train.example_index()
        if objective.joint and method.trained:
            raise UsageError(
                f"the loss of {self.recipe.objective.name} for one example depends on the whole batch, "
                "so no example can be scored alone",
                fix="--method random; or --method input_norm",
            )
        if not isinstance(data.train, EpochSource):
            raise UsageError(
                f"{self.recipe.data.source!r} has no fixed set of examples", fix="score a single source: --data SOURCE"
            )
        if method.needs and method.needs not in next(data.train.sequential_batches(1)).fields:
            raise UsageError(
                f"--method {self.scoring.by} requires examples with {method.needs}, but "
                f"{self.recipe.data.source!r} has none",
                fix="--method el2n; or --method grand; or --method loss",
            )
        self.clusters = self.scoring.clusters or len(data.train.example_index().label_names)
        if self.scoring.by == "prototype" and not self.clusters:
            raise UsageError(
                "the number of clusters is unknown, because the examples have no labels", fix="--clusters 10"
            )

    def provenance(self, prepared: PreparedRun, total: int) -> ScoreProvenance:
        tables = recipe_to_data(self.recipe)
        depends = {name: table for name, table in tables.items() if name not in NOT_SCORED_BY}
        depends["model files"] = _hashes(self.recipe.model.folder) | _hashes(self.scoring.embed_with)
        return ScoreProvenance(
            method=self.scoring.by,
            fingerprint=prepared.data.train.example_index().fingerprint,
            recipe=tables,
            recipe_sha256=hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest(),
            data=dict(prepared.data.identity),
            label_names=prepared.data.train.example_index().label_names,
            steps=self.steps,
            steps_of_recipe=total,
            model=self.scoring.embed_with,
            thrifty=__version__,
        )


def _hashes(folder: str) -> dict[str, str]:
    path = Path(folder).expanduser()
    files = sorted(each for each in path.rglob("*") if each.is_file()) if folder and path.is_dir() else []
    return {str(file): file_sha256(file) for file in files}
