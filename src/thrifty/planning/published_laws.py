"""Published constants of the scaling law, with sources and uncertainty.

The first two rows are the same fit. The paper prints exponents with two digits, and its TeX source has five digits.
Epoch AI read 245 runs from a figure of the paper, omitted the five runs with the highest loss and fitted again. The
last row is the converged minimum for the same 240 runs, from all 4500 starts of the paper with `scaling_law_fit.fit`.

The first two rows have no published errors. Epoch AI published one standard error per constant, but no correlations. A
and alpha are almost perfectly correlated, and so are B and beta. Independent errors would put the optimum at 5.76e23
FLOP between 0.1 and 3,100 tokens per parameter. A bootstrap of the same 240 runs reproduces the published errors:

            A     B      E      alpha  beta
published   125   1,290  0.026  0.015  0.021
bootstrap   122   1,350  0.026  0.015  0.020

Therefore the last two rows of constants use the covariance of the bootstrap."""

from dataclasses import asdict, dataclass
from typing import Any

from thrifty.planning.scaling_law import Interval, LawUncertainty, ScalingLaw, SizeRecommendation, recommend

FITTED_FLOPS = Interval(1.4e18, 1.3e22)
"""Range of compute (FLOP) of Epoch AI's runs. Recommendations outside of this range are extrapolations."""


@dataclass(frozen=True)
class PublishedLaw:
    name: str
    law: ScalingLaw
    source: str
    evidence: str
    """Description of how the constants were checked against the source."""
    uncertainty: LawUncertainty | None = None

    def recommend(self, *, flops: float | None = None, tokens: float | None = None) -> SizeRecommendation:
        draws = self.uncertainty.draw(self.law) if self.uncertainty else None
        return recommend(self.law, draws, flops=flops, tokens=tokens)

    def as_dict(self) -> dict[str, Any]:
        origin = self.uncertainty.origin if self.uncertainty else None
        return {**asdict(self), "uncertainty": origin}


BOOTSTRAP = LawUncertainty(
    standard_errors=(0.25353, 0.41665, 0.014155, 0.015113, 0.020388),
    correlations=(
        (1.0, -0.23518, 0.58593, 0.99934, -0.24120),
        (-0.23518, 1.0, 0.62388, -0.24486, 0.99968),
        (0.58593, 0.62388, 1.0, 0.58053, 0.62155),
        (0.99934, -0.24486, 0.58053, 1.0, -0.25131),
        (-0.24120, 0.99968, 0.62155, -0.25131, 1.0),
    ),
    origin="bootstrap of the 240 runs, 4000 resamples, as a normal distribution of (log A, log B, log E, alpha, beta)",
)

PUBLISHED = (
    PublishedLaw(
        "Hoffmann, as printed",
        ScalingLaw(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28),
        "Hoffmann et al. 2022, 2203.15556, approach 3",
        "read second-hand; exponents rounded to two digits; no errors of the constants published",
    ),
    PublishedLaw(
        "Hoffmann, unrounded",
        ScalingLaw(E=1.6934, A=406.4, B=410.7, alpha=0.33917, beta=0.28491),
        "the TeX source of the same paper",
        "read second-hand; the fit had stopped before its minimum; no errors of the constants published",
    ),
    PublishedLaw(
        "Epoch AI, published",
        ScalingLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658),
        "Besiroglu et al. 2024, 2404.10102",
        "read second-hand; standard errors A 125, B 1293, E 0.026, alpha 0.015, beta 0.021, no correlations",
        BOOTSTRAP,
    ),
    PublishedLaw(
        "re-fit",
        ScalingLaw(E=1.8172, A=477.8, B=2143.4, alpha=0.3473, beta=0.3672),
        "the 240 runs of Besiroglu et al. 2024, fitted to convergence with `scaling_law_fit.fit`",
        "computed twice, by separate programs",
        BOOTSTRAP,
    ),
)

BEST = PUBLISHED[-1]
"""Recommended constants for users without their own fit."""
