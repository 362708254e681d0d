"""IsoFLOP analysis: a parabola of loss in log size at each compute budget, and the movement of its minimum.

Paper  Hoffmann et al. 2022 (2203.15556), approach 2. It assumes no law, but the parabola is exact only near the
       minimum: sizes far from it, or more on one side, bias the result."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from thrifty.core.errors import UsageError
from thrifty.planning.scaling_law import COVERAGE, Interval
from thrifty.planning.scaling_law_fit import TrainedRun

SAME_BUDGET = 0.1
"""Largest relative difference of budgets in a group; whole steps rarely use a budget exactly."""


@dataclass(frozen=True)
class IsoFlopParabola:
    """The parabola of one budget: loss + curvature (log N - log parameters)^2."""

    flops: float
    runs: int
    parameters: float
    """Size of least loss."""
    interval: Interval | None
    """95 % interval of `parameters`; None with three runs, which determine the parabola exactly."""
    loss: float
    curvature: float


@dataclass(frozen=True)
class IsoFlop:
    """The optimal size as coefficient x FLOPs^exponent."""

    valleys: tuple[IsoFlopParabola, ...]
    exponent: float
    exponent_interval: Interval | None
    """95 % interval; None with two budgets, which determine the line exactly."""
    coefficient: float
    refused: tuple[str, ...]
    """Omitted budgets, with the reason."""

    def parameters(self, flops: float) -> float:
        return self.coefficient * flops**self.exponent


def isoflop(runs: Sequence[TrainedRun]) -> IsoFlop:
    """Fit the optimal size to runs. Raises UsageError if fewer than two budgets have a minimum among their sizes."""
    valleys: list[IsoFlopParabola] = []
    refused: list[str] = []
    for group in budgets(runs):
        valley = find_valley(group)
        if isinstance(valley, IsoFlopParabola):
            valleys.append(valley)
        else:
            refused.append(valley)
    if len(valleys) < 2:
        reasons = "; ".join(refused) or "all runs are of one budget"
        raise UsageError(f"fewer than two budgets have a minimum: {reasons}", fix="add runs of other sizes or budgets")
    log_flops = np.log([valley.flops for valley in valleys])
    log_parameters = np.log([valley.parameters for valley in valleys])
    (exponent, offset), margins = _least_squares(np.vander(log_flops, 2), log_parameters)
    interval = None if margins is None else _around(exponent, margins[0, 0], len(valleys) - 2)
    return IsoFlop(tuple(valleys), float(exponent), interval, float(np.exp(offset)), tuple(refused))


def budgets(runs: Sequence[TrainedRun]) -> list[list[TrainedRun]]:
    """Return the runs grouped by budget, smallest first."""
    groups: list[list[TrainedRun]] = []
    for run in sorted(runs, key=lambda run: run.flops):
        if groups and run.flops < groups[-1][0].flops * (1 + SAME_BUDGET):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def find_valley(runs: Sequence[TrainedRun]) -> IsoFlopParabola | str:
    """Return the parabola of one budget's runs, or the reason why there is none."""
    flops = float(np.exp(np.mean([np.log(run.flops) for run in runs])))
    log_sizes = np.log([run.parameters for run in runs])
    if len(np.unique(np.round(log_sizes, 2))) < 3:
        return f"{flops:.3g} FLOP: fewer than three sizes"
    centre = log_sizes.mean()
    losses = np.array([run.loss for run in runs])
    (curvature, slope, height), covariance = _least_squares(np.vander(log_sizes - centre, 3), losses)
    if curvature <= 0:
        return f"{flops:.3g} FLOP: the loss has no minimum in size"
    lowest = -slope / (2 * curvature)
    if not log_sizes.min() <= centre + lowest <= log_sizes.max():
        side = "smaller" if centre + lowest < log_sizes.min() else "larger"
        return f"{flops:.3g} FLOP: the minimum is outside the trained sizes, at {side} ones"
    interval = None
    if covariance is not None:
        gradient = np.array([slope / (2 * curvature**2), -1 / (2 * curvature), 0.0])
        logs = _around(centre + lowest, gradient @ covariance @ gradient, len(runs) - 3)
        interval = Interval(float(np.exp(logs.low)), float(np.exp(logs.high)))
    least = height - slope**2 / (4 * curvature)
    return IsoFlopParabola(flops, len(runs), float(np.exp(centre + lowest)), interval, float(least), float(curvature))


def _least_squares(design: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the coefficients, and their covariance if there are more values than coefficients."""
    coefficients = np.linalg.lstsq(design, values, rcond=None)[0]
    spare = len(values) - design.shape[1]
    if spare <= 0:
        return coefficients, None
    variance = np.square(values - design @ coefficients).sum() / spare
    return coefficients, variance * np.linalg.inv(design.T @ design)


def _around(value: float, variance: float, degrees_of_freedom: int) -> Interval:
    margin = stdtrit(degrees_of_freedom, (1 + COVERAGE) / 2) * np.sqrt(variance)
    return Interval(float(value - margin), float(value + margin))
