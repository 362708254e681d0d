"""Progressive stacking at equal compute: a large gain in a short run, a small gain in a run five times as long.

Paper     Gong et al. 2019, Efficient Training of BERT by Progressively Stacking (ICML). The schedule and the comparison
          at equal compute follow Kaddour et al. 2023, No Train No Gain (arXiv 2307.06440).
Note      Compute is the number of computed blocks over all steps, so a run with few blocks at first has more steps. The
          learning rate of each run decays until its own end. Embedding and head are not counted; at this size, they are
          a twentieth of the cost of a step.
"""

from typing import Literal

from thrifty.core.technique import Technique
from thrifty.experiments.study import Cells, Study, grid
from thrifty.experiments.tasks.equal_flops_task import QUANTITIES, after, losses_by
from thrifty.techniques.growth.stacking import ProgressiveStacking
from thrifty.techniques.schedules.cosine import CosineDecay

AT = (0.125, 0.3)
"""Fractions of a run at which the depth doubles."""

Way = Literal["full", "stacked", "zeroed", "mean"]
VARIANTS: dict[Way, list[Technique]] = {
    "full": [],
    "stacked": [ProgressiveStacking(at=AT)],
    "zeroed": [ProgressiveStacking(at=AT, start="zeroed")],
    "mean": [ProgressiveStacking(at=AT, moments="mean")],
}


def mean_depth(depth: int, at: tuple[float, ...] = AT) -> float:
    """Return the mean depth over a run that ends at `depth`. The depth doubles at each fraction in `at`."""
    ends, total = (*at, 1.0), 0.0
    for stage, end in enumerate(ends):
        start = ends[stage - 1] if stage else 0.0
        total += (end - start) * max(depth // 2 ** (len(at) - stage), 1)
    return total


def measure(
    seed: int, way: Way, full_steps: int, depth: int, width: int, length: int, batch: int, lr: float
) -> dict[str, float]:
    """Return the held-out loss with the compute of `full_steps` steps of the full model."""
    steps = full_steps if way == "full" else round(full_steps * depth / mean_depth(depth))
    chosen = [CosineDecay(warmup=0.05), *VARIANTS[way]]
    return after(steps, chosen, seed=seed, depth=depth, width=width, length=length, batch=batch, lr=lr)


def stacking(
    seeds: int = 3,
    budgets: tuple[int, ...] = (800, 4000),
    depth: int = 8,
    width: int = 64,
    length: int = 64,
    batch: int = 16,
    lr: float = 2e-3,
) -> Study:
    """An 8-block byte model at the compute of 800 and of 4000 full steps. It has all blocks from the start, or is
    stacked twice.

    Command   thrifty study stacking
    Expect    Stacking lowers the loss at the short budget. At a budget five times as long, the gain is less than half.
              Copied blocks with zeroed output, and moments averaged over layers, change the loss less than stacking.
              Duration: forty minutes on two cores.
    """
    fixed = {"depth": depth, "width": width, "length": length, "batch": batch, "lr": lr}
    cases = {label: {**case, **fixed} for label, case in grid(way=tuple(VARIANTS), full_steps=budgets).items()}
    short, long = budgets[0], budgets[-1]

    def gain(cells: Cells, budget: int, way: Way = "stacked") -> float:
        full, other = (cells[f"way {each}, full_steps {budget:g}"]["loss"] for each in ("full", way))
        return full - other

    def gains(cells: Cells) -> Cells:
        ways = [way for way in VARIANTS if way != "full"]
        return {
            f"gain of {way}, full_steps {budget:g}": {"gain": gain(cells, budget, way)}
            for way in ways
            for budget in budgets
        }

    return Study(
        measure=measure,
        cases=cases,
        quantities=QUANTITIES,
        seeds=seeds,
        derive=gains,
        expect={
            "at the short budget, stacking gains more than 0.02 nats": lambda c: gain(c, short) > 0.02,
            "at the long budget, the gain is less than half as large": lambda c: gain(c, long) < gain(c, short) / 2,
            **{
                f"at the short budget, {way} gains too": lambda c, way=way: gain(c, short, way) > 0
                for way in ("zeroed", "mean")
            },
        },
        plots=[losses_by("way")],
        minutes=40,
    )
