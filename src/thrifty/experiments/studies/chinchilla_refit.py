"""Chinchilla re-fit: on runs of a known scaling law, minimizing the summed loss recovers the law. The published fit
(mean loss, early stopping) does not recover the law.

Paper     Hoffmann et al. 2022 (arXiv 2203.15556), approach 3; Besiroglu et al. 2024 (arXiv 2404.10102), who found the
          mistake.
Note      Runs are synthetic, with losses of the re-fitted law. Each of 8 budgets has 30 model sizes, as in the paper,
          with 2 to 300 tokens per parameter. On the paper's own runs, at 5.76e23 FLOPs, the fit of the mean recommended
          64 tokens per parameter, and the fit of the sum 17.9.
"""

import math
from dataclasses import asdict
from typing import Literal

import numpy as np

from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.planning.published_laws import BEST, PUBLISHED
from thrifty.planning.scaling_law import FLOP_PER_PARAMETER_AND_TOKEN, ScalingLaw
from thrifty.planning.scaling_law_fit import COARSE_STARTS, PAPER_STARTS, FitProcedure, TrainedRun, fit, synthetic_runs

GOPHER = 5.76e23
"""Compute in FLOPs at which the papers compare their constants."""
BUDGETS = np.geomspace(6e18, 3e21, 8)
TOKENS_PER_PARAMETER = (2.0, 300.0)

Reduction = Literal["sum", "mean"]
PROCEDURES = {"sum": FitProcedure.CONVERGED, "mean": FitProcedure.STOPS_EARLY}
Starts = Literal["coarse", "paper"]
STARTS = {"coarse": COARSE_STARTS, "paper": PAPER_STARTS}


def isoflop_runs(law: ScalingLaw, per_budget: int, noise: float, seed: int) -> list[TrainedRun]:
    """Return runs with log-uniform model sizes at each budget; `noise` is the standard deviation of the log loss."""
    generator = np.random.default_rng(seed)
    runs: list[TrainedRun] = []
    for place, flops in enumerate(BUDGETS):
        ratios = np.exp(generator.uniform(*np.log(TOKENS_PER_PARAMETER), size=per_budget))
        sizes = np.sqrt(flops / (FLOP_PER_PARAMETER_AND_TOKEN * ratios))
        runs += synthetic_runs(law, sizes, [flops], noise, seed=len(BUDGETS) * seed + place)
    return runs


def as_printed(law: ScalingLaw) -> ScalingLaw:
    """Return the law with constants rounded to the digits that the paper prints."""
    digits = {"E": 2, "A": 1, "B": 1, "alpha": 2, "beta": 2}
    return ScalingLaw(**{name: round(value, digits[name]) for name, value in asdict(law).items()})


def sizing(law: ScalingLaw) -> dict[str, float]:
    """Return the constants of a law, and the model size that the law recommends."""
    ratio = law.optimal(GOPHER).tokens_per_parameter
    return {**asdict(law), "size_exponent": float(law.size_exponent), "tokens_per_parameter": float(ratio)}


def factor(ratio: float, other: float) -> float:
    """Return the larger of `ratio` / `other` and `other` / `ratio`."""
    return math.exp(abs(math.log(ratio / other)))


def measure(seed: int, reduction: Reduction, starts: Starts, noise: float, per_budget: int) -> dict[str, float]:
    """Fit a law to one set of synthetic runs; return its constants and errors."""
    law_fit = fit(isoflop_runs(BEST.law, per_budget, noise, seed), STARTS[starts], PROCEDURES[reduction])
    numbers = sizing(law_fit.law)
    ratio, rounded = (law.optimal(GOPHER).tokens_per_parameter for law in (law_fit.law, as_printed(law_fit.law)))
    return numbers | {
        "off_by": factor(ratio, BEST.law.optimal(GOPHER).tokens_per_parameter),
        "rounding": factor(ratio, rounded),
        "agreeing": law_fit.agreeing / law_fit.starts,
        "residual": law_fit.residual,
    }


def chinchilla_refit(
    seeds: int = 8, noise: float = 0.005, per_budget: int = 30, starts: tuple[Starts, ...] = ("coarse", "paper")
) -> Study:
    """Fits of 240 runs with and without noise. Fits of the sum start from 243 points. Fits of the mean start from 243
    points and from the paper's 4500 points.

    Command   thrifty study chinchilla_refit
    Expect    Without noise, fits of the sum recover the constants, and two thirds of their starting points agree. Fits
              of the mean end at different points for different starting points. The best of these fits recommends
              several times too many or too few tokens. With noise of half a percent, the recommendation of the sum is
              wrong by a factor of about 1.2. Rounding the published constants from five digits to two changes the
              recommendation from 59 to 93 tokens per parameter. Duration: three minutes on two cores.
    """
    cases = {
        f"{reduction}, {which} starts, {'noise' if amount else 'no noise'}": {
            "reduction": reduction, "starts": which, "noise": amount, "per_budget": per_budget
        }
        for amount in (0.0, noise)
        for reduction, which in (("sum", "coarse"), *(("mean", each) for each in starts))
    }  # fmt: skip

    def published(cells: Cells) -> Cells:
        return {published.name: sizing(published.law) for published in PUBLISHED}

    def off_by(cells: Cells, start: str, end: str = "no noise") -> float:
        return cells[f"{start} starts, {end}"]["off_by"]

    def ratio(cells: Cells, name: str) -> float:
        return cells[name]["tokens_per_parameter"]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "E": MeasuredQuantity("irreducible loss, nats per token"),
            "A": MeasuredQuantity("coefficient of the parameter term"),
            "B": MeasuredQuantity("coefficient of the token term"),
            "alpha": MeasuredQuantity("exponent of parameters"),
            "beta": MeasuredQuantity("exponent of tokens"),
            "size_exponent": MeasuredQuantity("exponent of compute in the optimal size"),
            "tokens_per_parameter": MeasuredQuantity(
                f"tokens per parameter of the compute-optimal model at {GOPHER:g} FLOP"
            ),
            "off_by": MeasuredQuantity("factor between fitted and true tokens per parameter, at least 1"),
            "rounding": MeasuredQuantity(
                "factor by which rounding to the printed digits changes the tokens per parameter"
            ),
            "agreeing": MeasuredQuantity("fraction of the starts that reached the best minimum"),
            "residual": MeasuredQuantity("median error of the fitted law, in log loss"),
        },
        seeds=seeds,
        derive=published,
        expect={
            "without noise, the sum recovers the law: tokens per parameter within 1 %": lambda c: (
                off_by(c, "sum, coarse") < 1.01
            ),
            ("without noise, the mean is off by a factor of at least 1.3, from few and from many starts"): lambda c: (
                min(off_by(c, "mean, coarse"), off_by(c, "mean, paper")) > 1.3
            ),
            "with noise, the mean is further off than the sum, from few and from many starts": lambda c: (
                min(off_by(c, "mean, coarse", "noise"), off_by(c, "mean, paper", "noise"))
                > off_by(c, "sum, coarse", "noise")
            ),
            "most starts of the sum agree; most starts of the mean do not": lambda c: all(
                (c[label]["agreeing"] > 0.5) == label.startswith("sum") for label in cases
            ),
            "rounding the published constants to two digits changes 59 tokens per parameter to 93": lambda c: (
                round(ratio(c, "Hoffmann, unrounded")) == 59 and round(ratio(c, "Hoffmann, as printed")) == 93
            ),
        },
        plots=[
            StudyPlot("ratio", f"Tokens per parameter at {GOPHER:g} FLOP", y="tokens_per_parameter", log_y=True),
            StudyPlot("off_by", "Error factor of the tokens per parameter", y="off_by", log_y=True),
        ],
        minutes=3,
    )
