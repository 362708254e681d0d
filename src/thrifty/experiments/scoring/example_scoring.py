"""Scoring: train some small runs by a recipe, look at every training example with each, and average.

The scores of a run that is finished are kept in the cache. So a scoring that was cut off, or that is to have more runs,
makes only what is missing.
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
"""Sections of a recipe that the scores of a run do not depend on; the seed is the run's own."""


@dataclass(frozen=True)
class ScoringSettings:
    by: str = "el2n"
    """One of `scoring_methods.METHODS`."""
    runs: int | None = None
    """How many, each with a seed of its own from the recipe's on; 5 unless given, 1 where nothing is trained."""
    steps: int | float = 0.2
    """How long each is trained: steps, or a share of the recipe's budget as a float; 0 for first values."""
    embed_with: str = ""
    """With prototype: a run folder, or one in Hugging Face layout, whose model embeds the examples."""
    clusters: int | None = None
    """With prototype: how many k-means looks for; as many as there are labels unless given."""

    def __post_init__(self) -> None:
        refuse_unknown("examples cannot be scored by", self.by, METHODS)
        if self.by != "prototype" and (self.embed_with or self.clusters is not None):
            what = "a model to embed with" if self.embed_with else "a number of clusters"
            raise UsageError(f"{what} is for prototypes, and scores are by {self.by}", fix="--method prototype")
        if self.runs is not None and self.runs < 1:
            raise UsageError(f"runs is {self.runs}", fix="give 1 or more")
        if not self.trained and self.count > 1:
            what = "with a given model" if self.embed_with else f"by {self.by}"
            raise UsageError(f"nothing is trained {what}, and one run says all", fix="--runs 1")
        if self.steps < 0 or (isinstance(self.steps, float) and self.steps > 1):
            raise UsageError(f"steps is {self.steps}", fix="give steps, such as 100, or a share of the run up to 1.0")
        if self.by == "forgetting" and not self.steps:
            raise UsageError("nothing is forgotten in 0 steps", fix="--steps 0.2")

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
    """Score every training example of a recipe; writes the file, returns the scores and the sha256 of the file.

    The scores of runs of a model of your own are not kept in the cache. Raises
    UsageError where the file exists, or the data or the objective do not let examples be scored so, ThriftyError where
    a run gives scores that are not finite.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("examples are scored by one process", fix="start it without torchrun")
    if out.exists():
        raise UsageError(f"{out} exists already", fix="give another --out, or remove it")
    whole = tuple(each for each in recipe.techniques if not isinstance(each, PrunedExamples))  # all examples are scored
    scores = _ScoringRuns(replace(recipe, techniques=whole), scoring, say).all()
    return scores, write_scores(out, scores)


@dataclass
class _ScoringRuns:
    recipe: Recipe
    scoring: ScoringSettings
    say: Say

    def all(self) -> ExampleScores:
        first = prepare_run(self.recipe)
        total = first.run.steps
        self.steps = in_steps(self.scoring.steps, total) if self.scoring.trained else 0
        if self.steps > total:
            raise UsageError(f"{self.steps} steps are more than the recipe's {total}", fix="--steps 1.0")
        self.check(first)
        self.facts = self.known(first, total)
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
            how = "kept from before" if part else f"{self.steps} steps" if self.scoring.trained else self.scoring.by
            self.say(f"run {number + 1} of {self.scoring.count} (seed {seed}): {how}")
            if part is None:
                again = replace(self.recipe, seed=seed)
                part = self.part(first if number == 0 else prepare_run(again, total, quiet=True), seed)
                if place:
                    write_scores(place, part)
            parts.append(part)
        return average_scores(parts)

    def part(self, prepared: PreparedRun, seed: int) -> ExampleScores:
        """What one run makes of all examples."""
        began, by = time.monotonic(), self.scoring.by
        if self.scoring.trained:
            scores, sight = trained_and_scored(prepared, by, self.steps, seed, self.clusters, self.say)
        else:
            named = Path(self.scoring.embed_with) if self.scoring.embed_with else None
            scores, sight = scored_by(named, self.recipe, prepared, by, self.clusters)
        if not scores.isfinite().all():
            raise ThriftyError(
                f"the run with seed {seed} gave {int((~scores.isfinite()).sum())} scores that are not finite",
                fix="lower the learning rate of the recipe, or score earlier: --steps",
            )
        flops, seconds = self.step_flops * self.steps + sight.flops, time.monotonic() - began
        facts = replace(self.facts, seeds=(seed,), flops=flops, seconds=seconds)
        return ExampleScores(scores, scores[None], facts, prepared.data.train.example_index().labels, sight.guesses)

    def check(self, prepared: PreparedRun) -> None:
        """Raises UsageError where the examples cannot be scored so."""
        method, objective, data = METHODS[self.scoring.by], prepared.run.plain.objective, prepared.data
        data.train.example_index()
        if objective.joint and method.trained:
            raise UsageError(
                f"the loss of {self.recipe.objective.name} for one example depends on the others of its batch: none "
                "can be scored by itself",
                fix="--method random or --method input_norm",
            )
        if not isinstance(data.train, EpochSource):
            raise UsageError(f"the examples of {self.recipe.data.source} cannot be gone through one by one")
        if method.needs and method.needs not in next(data.train.sequential_batches(1)).fields:
            raise UsageError(
                f"--method {self.scoring.by} is for examples with {method.needs}, and those of "
                f"{self.recipe.data.source} have none",
                fix="--method el2n, --method grand or --method loss",
            )
        self.clusters = self.scoring.clusters or len(data.train.example_index().label_names)
        if self.scoring.by == "prototype" and not self.clusters:
            raise UsageError("how many prototypes there are is not known: the examples have no labels", "--clusters 10")

    def known(self, prepared: PreparedRun, total: int) -> ScoreProvenance:
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
    """The sha256 of each file of a model folder, by its path: nothing where there is none."""
    path = Path(folder).expanduser()
    files = sorted(each for each in path.rglob("*") if each.is_file()) if folder and path.is_dir() else []
    return {str(file): file_sha256(file) for file in files}
