"""Fit of the scaling law to runs: minimize the sum of Huber losses on log loss, from many starts.

Paper  Hoffmann et al. 2022 (2203.15556), approach 3, with the correction of Besiroglu et al. 2024 (2404.10102).

The published fit minimized the mean of the Huber losses. Near the minimum, the mean is about 1e-5, so L-BFGS-B with its
default tolerance stops too early. `FitProcedure.CONVERGED` minimizes the scaled sum with a small tolerance. It also
centers log N and log D, which makes the two constants of a term nearly independent. `FitProcedure.STOPS_EARLY`
reproduces the early stop, for studies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product

import numpy as np
from scipy.optimize import minimize

from thrifty.core.errors import UsageError
from thrifty.planning.scaling_law import FLOP_PER_PARAMETER_AND_TOKEN, LawSamples, ScalingLaw, check_amount

DELTA = 1e-3
"""Huber threshold of residuals of log loss. Larger residuals count linearly, so outliers have little influence."""

FEWEST_RUNS, FEWEST_LEVELS = 6, 3
"""Minimum number of runs for five constants, and minimum number of sizes (and of token counts) for a power law."""


@dataclass(frozen=True)
class TrainedRun:
    """Size, tokens and loss of a run. `loss` is the held-out loss at the end of the schedule, in nats per token."""

    parameters: float
    tokens: float
    loss: float

    def __post_init__(self) -> None:
        for name in ("parameters", "tokens", "loss"):
            check_amount(f"{name} of a run", getattr(self, name))

    @property
    def flops(self) -> float:
        return FLOP_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens


class FitProcedure(Enum):
    CONVERGED = "sum of the losses, to convergence"
    STOPS_EARLY = "mean of the losses, the usual tolerance: the published mistake"


def grid(
    alphas: Sequence[float], betas: Sequence[float], log_es: Sequence[float], log_as: Sequence[float],
    log_bs: Sequence[float],
) -> np.ndarray:  # fmt: skip
    """Return all n combinations of the constants as rows (log A, log B, log E, alpha, beta), (n, 5)."""
    return np.array([[a, b, e, alpha, beta] for alpha, beta, e, a, b in product(alphas, betas, log_es, log_as, log_bs)])


PAPER_STARTS = grid(*[np.arange(0, 2.1, 0.5)] * 2, np.arange(-1, 1.1, 0.5), *[np.arange(0, 26, 5)] * 2)
"""The paper's grid of 4500 starts, (4500, 5). A fit of 240 runs takes about 20 s on one core."""

COARSE_STARTS = grid(*[(0.25, 0.5, 1.0)] * 2, (-1.0, 0.0, 1.0), *[(0.0, 5.0, 10.0)] * 2)
"""A grid of 243 starts, (243, 5). A fit takes about a second."""


def huber_objective(
    constants: np.ndarray, log_parameters: np.ndarray, log_tokens: np.ndarray, log_loss: np.ndarray
) -> tuple[float, np.ndarray]:
    """Return the fit error of constants over all runs, the sum of Huber(log L(N, D) - log loss), and its gradient (5,).

    `constants` (5,) are (log A, log B, log E, alpha, beta). The other arguments have shape (runs,). The predicted log
    loss is the log-sum-exp of log A - alpha log N, log B - beta log D and log E. Its gradient is the softmax of these
    three terms.
    """
    log_a, log_b, log_e, alpha, beta = constants
    terms = np.empty((3, len(log_loss)))
    terms[0] = log_a - alpha * log_parameters
    terms[1] = log_b - beta * log_tokens
    terms[2] = log_e
    largest = terms.max(axis=0)
    weights = np.exp(terms - largest)
    total = weights.sum(axis=0)
    residual = largest + np.log(total) - log_loss
    slope = np.clip(residual, -DELTA, DELTA)
    parts = weights * (slope / total)
    gradient = np.array([*parts.sum(axis=1), -(parts[0] @ log_parameters), -(parts[1] @ log_tokens)])
    return float(slope @ (residual - slope / 2)), gradient


@dataclass(frozen=True)
class LawFit:
    law: ScalingLaw
    objective: float
    """Sum of Huber losses of the fitted law."""
    residual: float
    """Median of |log L(N, D) - log loss| over the runs."""
    starts: int
    agreeing: int
    """Number of starts that reached the same minimum, within a relative difference of 1e-6."""
    draws: LawSamples | None
    """Laws fitted to bootstrap samples of the runs; None for `resamples` = 0."""


def fit(
    runs: Sequence[TrainedRun],
    starts: np.ndarray = COARSE_STARTS,
    procedure: FitProcedure = FitProcedure.CONVERGED,
    resamples: int = 0,
    seed: int = 0,
) -> LawFit:
    """Return the law with the minimum sum of Huber losses, and `resamples` bootstrap fits that start at this law.

    Raises UsageError if the runs do not determine the law: too few runs or sizes, one budget, or equal losses.
    """
    refuse_degenerate(runs)
    logs = _logs(runs)
    ends = [_descend(start, logs, procedure) for start in starts]
    objective, constants = min(ends, key=lambda end: end[0])
    for name, exponent in (("parameters", constants[3]), ("tokens", constants[4])):
        if exponent <= 0:
            raise UsageError(
                f"the loss of these runs does not fall as {name} grow: the fitted exponent is {exponent:.2g}",
                fix=f"add runs over a wider range of {name}, each with its schedule decayed to the end",
            )
    law = ScalingLaw.from_logs(constants)
    residual = np.log(law.loss(np.exp(logs[0]), np.exp(logs[1]))) - logs[2]
    return LawFit(
        law=law,
        objective=objective,
        residual=float(np.median(np.abs(residual))),
        starts=len(starts),
        agreeing=sum(value <= objective * (1 + 1e-6) + 1e-12 for value, _ in ends),
        draws=_bootstrap(runs, constants, procedure, resamples, seed) if resamples else None,
    )


def refuse_degenerate(runs: Sequence[TrainedRun]) -> None:
    """Raise UsageError with the reason if the runs cannot determine five constants."""
    if len(runs) < FEWEST_RUNS:
        raise UsageError(f"{len(runs)} runs cannot determine five constants", fix=f"pass at least {FEWEST_RUNS} runs")
    log_parameters, log_tokens, log_loss = _logs(runs)
    for name, values in (("sizes", log_parameters), ("numbers of tokens", log_tokens)):
        levels = len(np.unique(np.round(values, 2)))
        if levels < FEWEST_LEVELS:
            raise UsageError(
                f"the runs have {levels} different {name}; a power law plus a constant requires {FEWEST_LEVELS}",
                fix="train several sizes at several budgets, such as 5 sizes x 4 budgets",
            )
    slope = np.polyfit(log_parameters, log_tokens, 1)
    if np.std(log_tokens - np.polyval(slope, log_parameters)) < 0.05:
        raise UsageError(
            "the number of tokens is a function of the size in these runs, so both effects cannot be separated",
            fix="train each size with several numbers of tokens",
        )
    if np.ptp(log_loss) < 10 * DELTA:
        raise UsageError("all runs have nearly the same loss", fix="spread sizes and tokens over a factor of ten")


def _logs(runs: Sequence[TrainedRun]) -> np.ndarray:
    """Return log parameters, log tokens and log loss as rows, (3, runs)."""
    return np.log([[run.parameters, run.tokens, run.loss] for run in runs]).T


def _descend(start: np.ndarray, logs: np.ndarray, procedure: FitProcedure) -> tuple[float, np.ndarray]:
    """Run L-BFGS-B from `start`. Return the sum of Huber losses and the constants (5,) at the minimum."""
    converge = procedure is FitProcedure.CONVERGED
    scale = 1e6 if converge else 1 / logs.shape[1]
    settings = {"ftol": 1e-15, "gtol": 1e-12, "maxiter": 1000, "maxfun": 2000} if converge else {}
    centre = logs[:2].mean(axis=1) if converge else np.zeros(2)
    log_parameters, log_tokens = logs[:2] - centre[:, None]

    def scaled(constants: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = huber_objective(constants, log_parameters, log_tokens, logs[2])
        return scale * value, scale * gradient

    shifted = _shifted(start, -centre)
    minimum = minimize(scaled, shifted, jac=True, method="L-BFGS-B", options=settings)
    return float(minimum.fun) / scale, _shifted(minimum.x, centre)


def _shifted(constants: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """Return the constants of the same law after log N and log D shift by `centre`. Only log A and log B change."""
    shifted = np.array(constants, dtype=float)
    shifted[:2] += constants[3:] * centre
    return shifted


def _bootstrap(
    runs: Sequence[TrainedRun], constants: np.ndarray, procedure: FitProcedure, resamples: int, seed: int
) -> LawSamples | None:
    generator = np.random.default_rng(seed)
    samples, failed = [], 0
    for _ in range(resamples):
        resampled = [runs[i] for i in generator.integers(0, len(runs), len(runs))]
        try:
            refuse_degenerate(resampled)
        except UsageError:
            failed += 1
            continue
        samples.append(_descend(constants, _logs(resampled), procedure)[1])
    return LawSamples.from_logs(np.array(samples), failed) if samples else None


def synthetic_runs(
    law: ScalingLaw, sizes: Iterable[float], budgets: Iterable[float], noise: float = 0.0, seed: int = 0
) -> tuple[TrainedRun, ...]:
    """Return one synthetic run per size and budget (FLOP). The law predicts the losses, and log losses have normal
    noise of standard deviation `noise`."""
    generator = np.random.default_rng(seed)
    runs = []
    for size, budget in product(sizes, budgets):
        tokens = budget / (FLOP_PER_PARAMETER_AND_TOKEN * size)
        loss = law.loss(size, tokens) * np.exp(noise * generator.standard_normal())
        runs.append(TrainedRun(float(size), float(tokens), float(loss)))
    return tuple(runs)
