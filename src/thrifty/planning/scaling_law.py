"""Compute-optimal model size and number of tokens, by the law L(N, D) = E + A / N^alpha + B / D^beta.

Paper    Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (2203.15556), approach 3.
Compute  C = 6 N D FLOP for N parameters (all parameters) and D tokens. Matrix products inside attention do not count.

The constants are fitted to a few hundred runs, and the optimum is sensitive to the constants. Rounding two exponents to
two digits moves the optimum from 59 to 93 tokens per parameter. Therefore a law has samples: other laws that fit the
data about equally well. Each recommendation has an interval, computed from the samples. `published_laws.py` has
published constants. `scaling_law_fit.py` fits your own runs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from thrifty.core.errors import UsageError

Number = float | np.ndarray

FLOP_PER_PARAMETER_AND_TOKEN = 6.0
LARGEST_LOG = 700.0
"""Maximum logarithm with a finite exponential."""
COVERAGE = 0.95
"""Fraction of samples inside an interval."""


@dataclass(frozen=True)
class ScalingLaw:
    """The scaling law L(N, D) = E + A / N^alpha + B / D^beta, in nats per token. Every constant is positive.

    Constants may be arrays of the same shape, one law per element. Results then have this shape.
    """

    E: Number
    """Irreducible loss."""
    A: Number
    B: Number
    alpha: Number
    beta: Number

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.all(np.isfinite(value)) and np.all(np.asarray(value) > 0)):
                raise UsageError(
                    f"scaling law: {field.name} is {value}, not in (0, inf)", fix="pass five positive constants"
                )

    @classmethod
    def from_logs(cls, constants: np.ndarray) -> "ScalingLaw":
        """Return the law with these constants. They are (log A, log B, log E, alpha, beta), of shape (5,) or (samples,
        5)."""
        log_a, log_b, log_e, alpha, beta = np.moveaxis(np.asarray(constants, dtype=float), -1, 0)
        values = (np.exp(log_e), np.exp(log_a), np.exp(log_b), alpha, beta)
        return cls(*(value if value.ndim else float(value) for value in values))

    def logs(self) -> np.ndarray:
        """Return the constants (log A, log B, log E, alpha, beta), shape (5,) or (samples, 5)."""
        return np.stack([np.log(self.A), np.log(self.B), np.log(self.E), self.alpha, self.beta], axis=-1)

    def loss(self, parameters: Number, tokens: Number) -> Number:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def size_exponent(self) -> Number:
        """Exponent of compute in the optimal number of parameters: beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    def optimal(self, flops: float) -> "ModelSizing":
        """Return the model size N and the number of tokens D with minimum loss at C = `flops`.

        N = G (C/6)^(beta/(alpha+beta)), D = C / 6N, with G = (alpha A / (beta B))^(1/(alpha+beta)).
        """
        check_amount("flops", flops)
        product = flops / FLOP_PER_PARAMETER_AND_TOKEN
        exponents = self.alpha + self.beta
        log_g = np.log(self.alpha * self.A / (self.beta * self.B)) / exponents
        parameters = np.exp(log_g + self.size_exponent * np.log(product))
        return self._sizing(parameters, product / parameters)

    def optimal_for_tokens(self, tokens: float) -> "ModelSizing":
        """Return the model size for which `tokens` is the compute-optimal number of tokens."""
        check_amount("tokens", tokens)
        log_slope = np.log(self.beta * self.B / (self.alpha * self.A)) - self.beta * np.log(tokens)
        return self._sizing(np.exp(-log_slope / self.alpha), tokens)

    def _sizing(self, parameters: Number, tokens: Number) -> "ModelSizing":
        tokens = np.broadcast_to(tokens, np.shape(parameters))
        values = (parameters, tokens, self.loss(parameters, tokens))
        return ModelSizing(*(value if np.ndim(value) else float(value) for value in values))


@dataclass(frozen=True)
class ModelSizing:
    """A model size and number of tokens, with the predicted loss. Fields are arrays for several laws."""

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
    """Lower and upper bound of a quantity."""

    low: float
    high: float

    def ends(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True)
class LawSamples:
    """Samples of laws that fit the same data about equally well. `law` has arrays as constants."""

    law: ScalingLaw
    without_optimum: float = 0.0
    """Fraction of samples that were omitted, mostly because a law with an exponent <= 0 has no optimal size."""

    @classmethod
    def from_logs(cls, constants: np.ndarray, failed: int = 0) -> "LawSamples | None":
        """Return samples from rows (log A, log B, log E, alpha, beta). `failed` is the number of failed fits."""
        in_range = (np.abs(constants[:, :3]) < LARGEST_LOG).all(axis=1)
        usable = constants[in_range & (constants[:, 3:] > 0).all(axis=1)]
        if not len(usable):
            return None
        return cls(ScalingLaw.from_logs(usable), 1 - len(usable) / (len(constants) + failed))

    def interval(self, values: Number) -> Interval | None:
        """Return the central 95 % interval of values, or None if too many samples have no optimum."""
        tail = (1 - COVERAGE) / 2
        if self.without_optimum > tail:
            return None
        low, high = np.quantile(values, [tail, 1 - tail])
        return Interval(float(low), float(high)) if np.isfinite([low, high]).all() else None


@dataclass(frozen=True)
class LawUncertainty:
    """A normal distribution of (log A, log B, log E, alpha, beta) around a law."""

    standard_errors: Sequence[float]
    correlations: Sequence[Sequence[float]]
    origin: str
    """Source of the standard errors and correlations."""

    def draw(self, law: ScalingLaw, count: int = 4000, seed: int = 0) -> LawSamples:
        """Sample `count` laws from the distribution around a law."""
        errors = np.asarray(self.standard_errors)
        covariance = np.asarray(self.correlations) * np.outer(errors, errors)
        constants = np.random.default_rng(seed).multivariate_normal(law.logs(), covariance, size=count)
        samples = LawSamples.from_logs(constants)
        assert samples is not None, "no sampled law has an optimum"
        return samples


@dataclass(frozen=True)
class SizeRecommendation:
    """Optimal sizes by one law, with intervals."""

    sizing: ModelSizing
    intervals: dict[str, Interval | None]
    """95 % intervals by name of a quantity of `ModelSizing`; None if unknown."""

    def as_dict(self) -> dict[str, Any]:
        intervals = {name: None if each is None else each.ends() for name, each in self.intervals.items()}
        return {**self.sizing.as_dict(), "intervals": intervals}


def recommend(
    law: ScalingLaw, draws: LawSamples | None = None, *, flops: float | None = None, tokens: float | None = None
) -> SizeRecommendation:
    """Return the optimal model size and tokens for `flops`, or the optimal model size and compute for `tokens`.

    Raises UsageError unless exactly one of `flops` and `tokens` is set, or if the law has no optimum.
    """
    if (flops is None) == (tokens is None):
        raise UsageError("a recommendation requires either flops or tokens", fix="pass flops=1e18; or tokens=1e9")

    def size(scaling_law: ScalingLaw) -> ModelSizing:
        return scaling_law.optimal_for_tokens(tokens) if tokens is not None else scaling_law.optimal(flops or 0.0)

    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        sizing = size(law)
        many = None if draws is None else size(draws.law)
    if not np.isfinite(sizing.flops * sizing.tokens_per_parameter):
        raise UsageError(
            f"this law has no finite optimal size: {law}",
            fix="fit it to runs of a wider range",
        )
    if min(sizing.parameters, sizing.tokens) < 1:
        sizes = f"{sizing.parameters:.2g} parameters and {sizing.tokens:.2g} tokens"
        raise UsageError(f"the optimal sizes would be {sizes}, less than one", fix="pass a larger amount, such as 1e18")
    quantities = ("parameters", "flops" if flops is None else "tokens", "tokens_per_parameter", "loss")
    if draws is None:
        return SizeRecommendation(sizing, dict.fromkeys(quantities))
    return SizeRecommendation(sizing, {name: draws.interval(getattr(many, name)) for name in quantities})


def check_amount(name: str, value: float) -> None:
    """Raise UsageError unless `value` is positive and finite."""
    if not 0 < value < np.inf:
        raise UsageError(f"{name} is {value:g}", fix="pass a positive, finite number, such as 1e18")
