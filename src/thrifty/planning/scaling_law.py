"""Compute-optimal sizing: what to train for a given compute, by the law L(N, D) = E + A / N^alpha + B / D^beta.

Paper    Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (2203.15556), approach 3.
Compute  C = 6 N D FLOP for N parameters (all of them) and D tokens; the products inside attention are not counted.

The constants are known from a few hundred runs, and the answer is sensitive to them: rounding two exponents to two
digits moves it from 59 to 93 tokens per parameter. So a law comes with draws of the laws that fit as well, and every
answer with an interval. `published_laws.py` has the constants of the literature, `scaling_law_fit.py` fits those of
your runs.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from thrifty.core.errors import UsageError

Number = float | np.ndarray

FLOP_PER_PARAMETER_AND_TOKEN = 6.0
LARGEST_LOG = 700.0
"""Beyond it, exp leaves the range of a float."""
COVERAGE = 0.95
"""The share of draws that an interval covers."""


@dataclass(frozen=True)
class ScalingLaw:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats per token. Every constant is positive.

    The constants may be arrays of one shape: then this is as many laws at once, and so are the answers.
    """

    E: Number
    """What no model of any size gets below."""
    A: Number
    B: Number
    alpha: Number
    beta: Number

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.all(np.isfinite(value)) and np.all(np.asarray(value) > 0)):
                raise UsageError(f"scaling law: {field.name} is {value}", fix="all five constants must be positive")

    @classmethod
    def from_logs(cls, constants: np.ndarray) -> "ScalingLaw":
        """From (log A, log B, log E, alpha, beta), the order in which laws are fitted; (5,) or (draws, 5)."""
        log_a, log_b, log_e, alpha, beta = np.moveaxis(np.asarray(constants, dtype=float), -1, 0)
        values = (np.exp(log_e), np.exp(log_a), np.exp(log_b), alpha, beta)
        return cls(*(value if value.ndim else float(value) for value in values))

    def logs(self) -> np.ndarray:
        """(log A, log B, log E, alpha, beta)."""
        return np.stack([np.log(self.A), np.log(self.B), np.log(self.E), self.alpha, self.beta], axis=-1)

    def loss(self, parameters: Number, tokens: Number) -> Number:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def size_exponent(self) -> Number:
        """The optimal number of parameters grows as compute to this power."""
        return self.beta / (self.alpha + self.beta)

    def optimal(self, flops: float) -> "ModelSizing":
        """The sizes of least loss at a compute of `flops`: N = G (C/6)^(beta/(alpha+beta)), D = C / 6N."""
        check_amount("flops", flops)
        product = flops / FLOP_PER_PARAMETER_AND_TOKEN
        exponents = self.alpha + self.beta
        log_g = np.log(self.alpha * self.A / (self.beta * self.B)) / exponents
        parameters = np.exp(log_g + self.size_exponent * np.log(product))
        return self._sizing(parameters, product / parameters)

    def optimal_for_tokens(self, tokens: float) -> "ModelSizing":
        """The model for which this many tokens are the compute-optimal number."""
        check_amount("tokens", tokens)
        log_slope = np.log(self.beta * self.B / (self.alpha * self.A)) - self.beta * np.log(tokens)
        return self._sizing(np.exp(-log_slope / self.alpha), tokens)

    def _sizing(self, parameters: Number, tokens: Number) -> "ModelSizing":
        tokens = np.broadcast_to(tokens, np.shape(parameters))
        values = (parameters, tokens, self.loss(parameters, tokens))
        return ModelSizing(*(value if np.ndim(value) else float(value) for value in values))


@dataclass(frozen=True)
class ModelSizing:
    """A model's size and how much to train it, with the loss that a law predicts; arrays for several laws."""

    parameters: Number
    tokens: Number
    loss: Number

    @property
    def flops(self) -> Number:
        return FLOP_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens

    @property
    def tokens_per_parameter(self) -> Number:
        return self.tokens / self.parameters

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "flops": self.flops, "tokens_per_parameter": self.tokens_per_parameter}


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    def ends(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True)
class LawSamples:
    """Laws that explain the same data about as well, as one law of arrays."""

    law: ScalingLaw
    without_optimum: float = 0.0
    """The share of draws left out since one of their exponents is not positive: they have no best size."""

    @classmethod
    def from_logs(cls, constants: np.ndarray, failed: int = 0) -> "LawSamples | None":
        """From rows of (log A, log B, log E, alpha, beta), and the number of draws that gave none at all."""
        in_range = (np.abs(constants[:, :3]) < LARGEST_LOG).all(axis=1)
        usable = constants[in_range & (constants[:, 3:] > 0).all(axis=1)]
        if not len(usable):
            return None
        return cls(ScalingLaw.from_logs(usable), 1 - len(usable) / (len(constants) + failed))

    def interval(self, values: Number) -> Interval | None:
        """The central 95 % of what the draws say; None where too many of them have no optimum to know its ends."""
        tail = (1 - COVERAGE) / 2
        if self.without_optimum > tail:
            return None
        low, high = np.quantile(values, [tail, 1 - tail])
        return Interval(float(low), float(high)) if np.isfinite([low, high]).all() else None


@dataclass(frozen=True)
class LawUncertainty:
    """A normal distribution of (log A, log B, log E, alpha, beta) around a law, from which laws are drawn."""

    standard_errors: Sequence[float]
    correlations: Sequence[Sequence[float]]
    origin: str
    """Where the errors and the correlations come from."""

    def draw(self, law: ScalingLaw, count: int = 4000, seed: int = 0) -> LawSamples:
        errors = np.asarray(self.standard_errors)
        covariance = np.asarray(self.correlations) * np.outer(errors, errors)
        drawn = np.random.default_rng(seed).multivariate_normal(law.logs(), covariance, size=count)
        draws = LawSamples.from_logs(drawn)
        assert draws is not None, "an uncertainty under which no law has an optimum"
        return draws


@dataclass(frozen=True)
class SizeRecommendation:
    """What one law says."""

    sizing: ModelSizing
    intervals: dict[str, Interval | None]
    """For each answered quantity of `ModelSizing`; None where nothing is known of the law's uncertainty."""

    def as_dict(self) -> dict[str, Any]:
        intervals = {name: None if each is None else each.ends() for name, each in self.intervals.items()}
        return {**self.sizing.as_dict(), "intervals": intervals}


def recommend(
    law: ScalingLaw, draws: LawSamples | None = None, *, flops: float | None = None, tokens: float | None = None
) -> SizeRecommendation:
    """The best sizes for a compute of `flops`, or the model and the compute that suit a number of `tokens`."""
    if (flops is None) == (tokens is None):
        raise UsageError("a recommendation needs either flops or tokens", fix="give exactly one of them")

    def size(scaling_law: ScalingLaw) -> ModelSizing:
        return scaling_law.optimal_for_tokens(tokens) if tokens is not None else scaling_law.optimal(flops or 0.0)

    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        sizing = size(law)
        many = None if draws is None else size(draws.law)
    if not np.isfinite(sizing.flops * sizing.tokens_per_parameter):
        raise UsageError(f"this law has no finite best size: {law}", fix="fit it to runs of a wider range")
    if min(sizing.parameters, sizing.tokens) < 1:
        what = f"the best sizes would be {sizing.parameters:.2g} parameters and {sizing.tokens:.2g} tokens"
        raise UsageError(f"{what}: no law speaks of so little", fix="give an amount that some model is trained with")
    answered = ("parameters", "flops" if flops is None else "tokens", "tokens_per_parameter", "loss")
    if draws is None:
        return SizeRecommendation(sizing, dict.fromkeys(answered))
    return SizeRecommendation(sizing, {name: draws.interval(getattr(many, name)) for name in answered})


def check_amount(name: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise UsageError(f"{name} is {value:g}", fix="give a positive, finite number, such as 1e18")
