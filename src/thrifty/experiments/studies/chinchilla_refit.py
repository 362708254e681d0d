"""The Chinchilla re-fit: from runs of a law that is known, the sum of the losses finds it, and the published procedure,
which took their mean and stopped early, does not.

Paper     Hoffmann et al. 2022 (arXiv 2203.15556), approach 3; Besiroglu et al. 2024 (arXiv 2404.10102), who found the
          mistake.
Note      the runs are made up: 30 sizes at each of 8 budgets as in the paper, 2 to 300 tokens per parameter, with
          losses of the re-fitted law. On the runs of the paper itself the mean gave 64 tokens per parameter at
          5.76e23 FLOP, and the sum 17.9.
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
"""The compute, in FLOP, at which the papers compare their constants."""
BUDGETS = np.geomspace(6e18, 3e21, 8)
TOKENS_PER_PARAMETER = (2.0, 300.0)

Reduction = Literal["sum", "mean"]
PROCEDURES = {"sum": FitProcedure.CONVERGED, "mean": FitProcedure.STOPS_EARLY}
Starts = Literal["coarse", "paper"]
STARTS = {"coarse": COARSE_STARTS, "paper": PAPER_STARTS}


def isoflop_runs(law: ScalingLaw, per_budget: int, noise: float, seed: int) -> list[TrainedRun]:
    """Sizes drawn evenly in their logarithm at each budget; `noise` is the standard deviation of log loss."""
    generator = np.random.default_rng(seed)
    runs: list[TrainedRun] = []
    for place, flops in enumerate(BUDGETS):
        ratios = np.exp(generator.uniform(*np.log(TOKENS_PER_PARAMETER), size=per_budget))
        sizes = np.sqrt(flops / (FLOP_PER_PARAMETER_AND_TOKEN * ratios))
        runs += synthetic_runs(law, sizes, [flops], noise, seed=len(BUDGETS) * seed + place)
    return runs


def as_printed(law: ScalingLaw) -> ScalingLaw:
    """The law with as many digits as the paper printed."""
    digits = {"E": 2, "A": 1, "B": 1, "alpha": 2, "beta": 2}
    return ScalingLaw(**{name: round(value, digits[name]) for name, value in asdict(law).items()})


def sizing(law: ScalingLaw) -> dict[str, float]:
    """The constants and what they recommend."""
    ratio = law.optimal(GOPHER).tokens_per_parameter
    return {**asdict(law), "size_exponent": float(law.size_exponent), "tokens_per_parameter": float(ratio)}


def factor(ratio: float, other: float) -> float:
    """How far apart two ratios are, at least 1."""
    return math.exp(abs(math.log(ratio / other)))


def measure(seed: int, reduction: Reduction, starts: Starts, noise: float, per_budget: int) -> dict[str, float]:
    """What one fit makes of one set of runs."""
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
    """Fits of 240 runs without and with noise: the sum from 243 starts; the mean from these, and from the paper's 4500.

    Command   thrifty study chinchilla_refit
    Expect    without noise the sum gives the constants back and two thirds of its starts end there; the mean ends at
              another place for every start, and the best of them recommends several times too many or too few tokens.
              With noise of half a percent the sum is off by a factor of about 1.2. Two digits instead of five
              move the published answer from 59 to 93 tokens per parameter. Three minutes on two cores.
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
            "E": MeasuredQuantity("the lowest loss of all, nats per token"),
            "A": MeasuredQuantity("the factor of the term in parameters"),
            "B": MeasuredQuantity("the factor of the term in tokens"),
            "alpha": MeasuredQuantity("the exponent of parameters"),
            "beta": MeasuredQuantity("the exponent of tokens"),
            "size_exponent": MeasuredQuantity("of compute, to which the optimal size is proportional"),
            "tokens_per_parameter": MeasuredQuantity(f"of the compute-optimal model at {GOPHER:g} FLOP"),
            "off_by": MeasuredQuantity("by what factor that misses the one of the law that made the runs, at least 1"),
            "rounding": MeasuredQuantity(
                "by what factor it moves when the constants are rounded as the paper printed them"
            ),
            "agreeing": MeasuredQuantity("share of the starts that ended at the minimum that was found"),
            "residual": MeasuredQuantity("median distance of the runs from the fitted law, in log loss"),
        },
        seeds=seeds,
        derive=published,
        expect={
            "without noise the sum gives the law back, to a hundredth of the tokens per parameter": lambda c: (
                off_by(c, "sum, coarse") < 1.01
            ),
            (
                "the mean misses it without any noise, by a factor of 1.3 and more, from few starts and from many"
            ): lambda c: min(off_by(c, "mean, coarse"), off_by(c, "mean, paper")) > 1.3,
            "with noise the mean misses by more than the sum, from few starts and from many": lambda c: (
                min(off_by(c, "mean, coarse", "noise"), off_by(c, "mean, paper", "noise"))
                > off_by(c, "sum, coarse", "noise")
            ),
            "most starts of the sum agree, and hardly any two of the mean": lambda c: all(
                (c[label]["agreeing"] > 0.5) == label.startswith("sum") for label in cases
            ),
            "two digits of the published constants instead of five move 59 tokens per parameter to 93": lambda c: (
                round(ratio(c, "Hoffmann, unrounded")) == 59 and round(ratio(c, "Hoffmann, as printed")) == 93
            ),
        },
        plots=[
            StudyPlot("ratio", f"Tokens per parameter at {GOPHER:g} FLOP", y="tokens_per_parameter", log_y=True),
            StudyPlot("off_by", "By what factor the tokens per parameter are missed", y="off_by", log_y=True),
        ],
        minutes=3,
    )
