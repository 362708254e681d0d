"""Summary of a study's cells: means over seeds with confidence intervals, and verdicts on expectations."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

from thrifty.core.errors import UsageError
from thrifty.experiments.study import Cells, Numbers, Study

CONFIDENCE = 0.95
HOLDS, FAILS, OPEN = "holds", "does not hold", "open"
"""Verdicts on an expectation. The verdict is "open" if a case or quantity of the condition was not measured."""

Measured = Mapping[tuple[str, int], Numbers]
"""Measured values of each cell, keyed by case and seed."""
Summary = Mapping[str, Mapping[str, "SeedMean"]]
"""Means keyed by case (or derived row) and quantity."""


@dataclass(frozen=True)
class SeedMean:
    """Mean of a quantity over `runs` seeds. The mean is infinite if the quantity is infinite for any seed."""

    mean: float
    half_width: float
    """Half-width of the 95 % confidence interval (Student's t); NaN for one seed or an infinite mean."""
    runs: int
    never: int = 0
    """Number of runs with an infinite value."""

    def half_width_for(self, fresh: int) -> float:
        """Return the half-width of the 95 % prediction interval for a mean over `fresh` new seeds.

        The interval includes the uncertainty of the present mean and of the new mean.
        """
        return self.half_width * math.sqrt(1 + self.runs / fresh)


@dataclass(frozen=True)
class ExpectationVerdict:
    """Verdict on one expectation, judged on means over seeds, and the number of seeds for which it holds."""

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
    """Return the values of each seed by case. If all cases of a seed are measured, derived rows are included."""
    seeds: dict[int, dict[str, Numbers]] = {}
    for (label, seed), numbers in measured.items():
        seeds.setdefault(seed, {})[label] = numbers
    for cells in seeds.values():
        if study.derive and cells.keys() == study.cases.keys():
            cells.update(study.derive(dict(cells)))
    return seeds


def summarize(study: Study, measured: Measured) -> dict[str, dict[str, SeedMean]]:
    """Return means in the order of the study's cases, then derived rows. Raises UsageError for an unknown quantity."""
    values: dict[str, dict[str, list[float]]] = {label: {} for label in study.cases}
    for cells in cells_of(study, measured).values():
        for label, numbers in cells.items():
            if unknown := numbers.keys() - study.quantities.keys():
                known = ", ".join(study.quantities)
                raise UsageError(
                    f"{study.name}: {', '.join(unknown)!r} is not a quantity of the study", fix=f"use {known}"
                )
            for name, value in numbers.items():
                values.setdefault(label, {}).setdefault(name, []).append(value)
    return {
        label: {name: estimate(per_seed) for name, per_seed in numbers.items()}
        for label, numbers in values.items()
        if numbers
    }


def judge_expectations(study: Study, measured: Measured) -> list[ExpectationVerdict]:
    """Judge every expectation of the study on the means and on each seed."""
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
