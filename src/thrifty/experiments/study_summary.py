"""Cells put together: means over seeds with their intervals, and which statements hold."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

from thrifty.core.errors import UsageError
from thrifty.experiments.study import Cells, Numbers, Study

CONFIDENCE = 0.95
HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
"""What can become of a statement; open where something it speaks of was not measured or found."""

Measured = Mapping[tuple[str, int], Numbers]
"""The numbers of each cell, by its case and seed."""
Summary = Mapping[str, Mapping[str, "SeedMean"]]
"""By case (and derived row) and number."""


@dataclass(frozen=True)
class SeedMean:
    """The mean of a number over `runs` seeds; infinite as soon as one of them is."""

    mean: float
    half_width: float
    """Of the 95 % confidence interval by Student's t; nan when there is none, for one seed or an infinite mean."""
    runs: int
    never: int = 0
    """How many of the runs were infinite."""

    def half_width_for(self, fresh: int) -> float:
        """Within this of the mean, the mean over `fresh` other seeds lies with the same confidence: the uncertainty
        of both means together."""
        return self.half_width * math.sqrt(1 + self.runs / fresh)


@dataclass(frozen=True)
class ExpectationVerdict:
    """Whether a statement holds of the means, and of how many of the seeds alone."""

    sentence: str
    verdict: str
    held: int
    seeds: int


def estimate(values: Sequence[float]) -> SeedMean:
    runs, never = len(values), sum(not math.isfinite(value) for value in values)
    if never:
        return SeedMean(math.inf, math.nan, runs, never)
    if runs == 1:
        return SeedMean(values[0], math.nan, 1)
    quantile = float(stdtrit(runs - 1, (1 + CONFIDENCE) / 2))
    return SeedMean(fmean(values), quantile * stdev(values) / math.sqrt(runs), runs)


def cells_of(study: Study, measured: Measured) -> dict[int, dict[str, Numbers]]:
    """The cells of each seed, with what is derived from them where all cases of the seed are there."""
    seeds: dict[int, dict[str, Numbers]] = {}
    for (label, seed), numbers in measured.items():
        seeds.setdefault(seed, {})[label] = numbers
    for cells in seeds.values():
        if study.derive and cells.keys() == study.cases.keys():
            cells.update(study.derive(dict(cells)))
    return seeds


def summarize(study: Study, measured: Measured) -> dict[str, dict[str, SeedMean]]:
    """In the order of the study's cases, derived rows last. Raises UsageError for a number the study does not name."""
    values: dict[str, dict[str, list[float]]] = {label: {} for label in study.cases}
    for cells in cells_of(study, measured).values():
        for label, numbers in cells.items():
            if unknown := numbers.keys() - study.quantities.keys():
                known = ", ".join(study.quantities)
                raise UsageError(f"{study.name}: {', '.join(unknown)} is none of its quantities", fix=f"it has {known}")
            for name, value in numbers.items():
                values.setdefault(label, {}).setdefault(name, []).append(value)
    return {
        label: {name: estimate(per_seed) for name, per_seed in numbers.items()}
        for label, numbers in values.items()
        if numbers
    }


def judge_expectations(study: Study, measured: Measured) -> list[ExpectationVerdict]:
    """Every statement of the study, held against the means and against each seed."""
    means = {
        label: {name: estimated.mean for name, estimated in numbers.items()}
        for label, numbers in summarize(study, measured).items()
    }
    seeds = cells_of(study, measured).values()
    verdicts = []
    for sentence, holds in study.expect.items():
        known = [verdict for cells in seeds if (verdict := _verdict(holds, cells)) != OPEN]
        verdicts.append(ExpectationVerdict(sentence, _verdict(holds, means), known.count(HOLDS), len(known)))
    return verdicts


def _verdict(holds: Callable[[Cells], bool], cells: Cells) -> str:
    try:
        return HOLDS if holds(cells) else FAILS
    except KeyError:
        return OPEN
