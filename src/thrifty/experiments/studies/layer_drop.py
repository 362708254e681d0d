"""Progressive layer dropping at equal compute: no gain.

Paper     Zhang & He 2020, Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping
          (arXiv 2010.13369). Kaddour et al. 2023, No Train No Gain (arXiv 2307.06440), found no gain at equal budgets.
Note      Compute is the expected number of computed blocks over all steps. A run that drops blocks therefore has more
          steps than a run with all blocks.
"""

from typing import Literal

from thrifty.core.technique import Technique
from thrifty.experiments.study import Cells, Study, grid
from thrifty.experiments.tasks.equal_flops_task import QUANTITIES, after, losses_by
from thrifty.techniques.growth.layer_drop import LayerDrop, keep_probability, theta_at
from thrifty.techniques.schedules.constant_then_decay import ConstantThenDecay
from thrifty.techniques.schedules.cosine import CosineDecay

THETA, SETTLE = 0.5, 0.01
Rate = Literal["constant", "cosine"]
RATES: dict[Rate, Technique] = {
    "constant": ConstantThenDecay(warmup=0.05, decay_from=1.0),
    "cosine": CosineDecay(warmup=0.05),
}


def steps_for(block_steps: float, depth: int, theta: float = THETA, settle: float = SETTLE) -> int:
    """Return the largest number of steps whose expected number of computed blocks is at most `block_steps`."""

    def spent(steps: int) -> float:
        pace = round(settle * steps)
        thetas = (theta_at(step, theta, pace) for step in range(steps))
        return sum(keep_probability(block, depth, now) for now in thetas for block in range(depth))

    low, high = round(block_steps / depth), round(block_steps / depth / theta) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent(middle) <= block_steps else (low, middle)
    return low


def measure(
    seed: int, dropping: bool, rate: Rate, full_steps: int, depth: int, width: int, length: int, batch: int, lr: float
) -> dict[str, float]:
    """Return the held-out loss with the compute of `full_steps` steps of all blocks."""
    steps = steps_for(full_steps * depth, depth) if dropping else full_steps
    chosen = [RATES[rate], *([LayerDrop(theta=THETA, time_constant=SETTLE, seed=seed)] if dropping else [])]
    return after(steps, chosen, seed=seed, depth=depth, width=width, length=length, batch=batch, lr=lr)


def layer_drop(
    seeds: int = 3,
    budgets: tuple[int, ...] = (800, 4000),
    depth: int = 8,
    width: int = 64,
    length: int = 64,
    batch: int = 16,
    lr: float = 2e-3,
) -> Study:
    """An 8-block byte model with and without dropped blocks, at the compute of 800 and of 4000 full steps.

    The learning rate is constant or decays.

    Command   thrifty study layer_drop
    Expect    No gain of 0.01 nats in any of the four settings. Duration: forty minutes on two cores.
    """
    fixed = {"depth": depth, "width": width, "length": length, "batch": batch, "lr": lr}
    levels = grid(dropping=(False, True), rate=tuple(RATES), full_steps=budgets)

    def gain(cells: Cells, rate: Rate, budget: int) -> float:
        full, dropped = (
            cells[f"dropping {each}, rate {rate}, full_steps {budget:g}"]["loss"] for each in (False, True)
        )
        return full - dropped

    def gains(cells: Cells) -> Cells:
        return {
            f"gain of dropping, rate {rate}, full_steps {budget:g}": {"gain": gain(cells, rate, budget)}
            for rate in RATES
            for budget in budgets
        }

    return Study(
        measure=measure,
        cases={label: {**level, **fixed} for label, level in levels.items()},
        quantities=QUANTITIES,
        seeds=seeds,
        derive=gains,
        expect={
            (
                f"at a {rate} rate, the gain at the compute of {budget} steps is less than 0.01 nats"
            ): lambda c, rate=rate, budget=budget: gain(c, rate, budget) < 0.01
            for rate in RATES
            for budget in budgets
        },
        plots=[losses_by("dropping")],
        minutes=40,
    )
