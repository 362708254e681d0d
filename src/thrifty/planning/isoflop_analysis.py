"""IsoFLOP analysis: for each compute budget, fit a parabola of loss over log size. Its minimum is the optimal size.

Paper  Hoffmann et al. 2022 (2203.15556), approach 2. The method assumes no law, but a parabola is accurate only near
       the minimum. Sizes far from the minimum, or mostly on one side of it, bias the result."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from thrifty.core.errors import UsageError
from thrifty.planning.scaling_law import COVERAGE, Interval
from thrifty.planning.scaling_law_fit import TrainedRun

SAME_BUDGET = 0.1
"""Maximum relative difference of budgets in a group. Budgets of runs differ slightly, because runs have whole
numbers of steps."""


@dataclass(frozen=True)
class IsoFlopParabola:
    """Parabola of loss over model size N for one budget: `loss` + `curvature` · (log N - log `parameters`)^2."""

    flops: float
    runs: int
    parameters: float
    """Model size with minimum loss."""
    interval: Interval | None
    """95 % interval of `parameters`; None for three runs, because three runs determine the parabola exactly."""
    loss: float
    curvature: float


@dataclass(frozen=True)
class IsoFlop:
    """The optimal model size as a power law: coefficient · FLOPs^exponent."""

    valleys: tuple[IsoFlopParabola, ...]
    exponent: float
    exponent_interval: Interval | None
    """95 % interval of `exponent`; None for two budgets, because two budgets determine the line exactly."""
    coefficient: float
    refused: tuple[str, ...]
    """Omitted budgets, with reasons."""

    def parameters(self, flops: float) -> float:
        return self.coefficient * flops**self.exponent


def isoflop(runs: Sequence[TrainedRun]) -> IsoFlop:
    """Fit the optimal size to runs.

    Raises UsageError unless at least two budgets have a loss minimum between the trained sizes.
    """
    valleys: list[IsoFlopParabola] = []
    refused: list[str] = []
    for group in budgets(runs):
        valley = find_valley(group)
        if isinstance(valley, IsoFlopParabola):
            valleys.append(valley)
        else:
            refused.append(valley)
    if len(valleys) < 2:
        reasons = "; ".join(refused) or "all runs have the same budget"
        what = f"fewer than two budgets have a loss minimum: {reasons}"
        raise UsageError(what, fix="add runs of other sizes or budgets")
    log_flops = np.log([valley.flops for valley in valleys])
    log_parameters = np.log([valley.parameters for valley in valleys])
    (exponent, offset), margins = _least_squares(np.vander(log_flops, 2), log_parameters)
    interval = None if margins is None else _around(exponent, margins[0, 0], len(valleys) - 2)
    return IsoFlop(tuple(valleys), float(exponent), interval, float(np.exp(offset)), tuple(refused))


def budgets(runs: Sequence[TrainedRun]) -> list[list[TrainedRun]]:
    """Return the runs grouped by budget, in ascending order."""
    groups: list[list[TrainedRun]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and run.flops < groups[-1][0].flops * (1 + SAME_BUDGET):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def find_valley(runs: Sequence[TrainedRun]) -> IsoFlopParabola | str:
    """Return the parabola of one budget's runs, or the reason against a fit."""
    flops = float(np.exp(np.mean([np.log(run.flops) for run in runs])))
    log_sizes = np.log([run.parameters for run in runs])
    if len(np.unique(np.round(log_sizes, 2))) < 3:
        return f"{flops:.3g} FLOP: fewer than three sizes"
    centre = log_sizes.mean()
    losses = np.array([run.loss for run in runs])
    (curvature, slope, height), covariance = _least_squares(np.vander(log_sizes - centre, 3), losses)
    if curvature <= 0:
        return f"{flops:.3g} FLOP: the loss has no minimum over model size"
    lowest = -slope / (2 * curvature)
    if not log_sizes.min() <= centre + lowest <= log_sizes.max():
        side = "smaller" if centre + lowest < log_sizes.min() else "larger"
        return f"{flops:.3g} FLOP: the loss minimum is outside of the trained sizes, at {side} sizes"
    interval = None
    if covariance is not None:
        gradient = np.array([slope / (2 * curvature**2), -1 / (2 * curvature), 0.0])
        logs = _around(centre + lowest, gradient @ covariance @ gradient, len(runs) - 3)
        interval = Interval(float(np.exp(logs.low)), float(np.exp(logs.high)))
    least = height - slope**2 / (4 * curvature)
    return IsoFlopParabola(flops, len(runs), float(np.exp(centre + lowest)), interval, float(least), float(curvature))


def _least_squares(design: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the coefficients, and their covariance (None unless there are more values than coefficients)."""
    coefficients = np.linalg.lstsq(design, values, rcond=None)[0]
    spare = len(values) - design.shape[1]
    if spare <= 0:
        return coefficients, None
    variance = np.square(values - design @ coefficients).sum() / spare
    return coefficients, variance * np.linalg.inv(design.T @ design)


def _around(value: float, variance: float, degrees_of_freedom: int) -> Interval:
    margin = stdtrit(degrees_of_freedom, (1 + COVERAGE) / 2) * np.sqrt(variance)
    return Interval(float(value - margin), float(value + margin))
