"""Lion's best learning rate is 3 to 10 times lower than AdamW's best rate.

Paper     Chen et al. 2023, Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675).
Note      Runs have no weight decay, because its strength would change with the learning rate. Lion is reported to
          require large batches. With 16 examples per step, Lion is expected to end with a higher loss than AdamW; the
          study measures the difference.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.language_task import train_llama
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.optimizers.lion import Lion
from thrifty.techniques.schedules.linear import LinearDecay

Optimizer = Literal["adamw", "lion"]
OPTIMIZERS = {"adamw": AdamW, "lion": Lion}
RATES: Mapping[Optimizer, Sequence[float]] = {
    "adamw": (1.8e-3, 3.2e-3, 5.6e-3, 1e-2, 1.8e-2, 3.2e-2),
    "lion": (3.2e-4, 5.6e-4, 1e-3, 1.8e-3, 3.2e-3, 5.6e-3),
}
"""Learning rates of each optimizer, four per decade."""
RATIO = "AdamW's best rate over Lion's"


def measure(
    seed: int, optimizer: Optimizer, rate: float, depth: int, width: int, length: int, batch: int, steps: int
) -> dict[str, float]:
    """Return the held-out loss of a model trained at the peak learning rate `rate`, with warm-up and decay until the
    end of the run.
    """
    chosen = [OPTIMIZERS[optimizer](lr=rate, weight_decay=0.0), LinearDecay(warmup=0.1), GradientClipping()]
    trained = train_llama(chosen, steps=steps, seed=seed, depth=depth, width=width, length=length, batch=batch)
    return {"loss": trained.held_out_loss(), "seconds": trained.seconds}


def lowest_point(rates: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """Return the learning rate of lowest loss, and that loss. A parabola in the log rate is fitted to the best rate and
    its two neighbors.

    If the best rate has no two neighbors of finite loss, return the best rate itself.
    """
    best = min(range(len(rates)), key=lambda place: losses[place])
    near = slice(best - 1, best + 2)
    if best == 0 or len(rates[near]) < 3 or not all(map(math.isfinite, losses[near])):
        return rates[best], losses[best]
    curve = np.polynomial.Polynomial.fit(np.log(rates[near]), losses[near], 2)
    (lowest,) = curve.deriv().roots()
    return math.exp(lowest), float(curve(lowest))


def optima(cells: Cells) -> Cells:
    """Return the best learning rate of each optimizer, and a comparison of the two optimizers."""
    rows = {}
    for optimizer, rates in RATES.items():
        losses = [cells[_label(optimizer, rate)]["loss"] for rate in rates]
        rate, loss = lowest_point(rates, losses)
        inside = min(losses[0], losses[-1]) > min(losses)
        rows[f"best of {optimizer}"] = {"best_rate": rate, "loss": loss, "inside": float(inside)}
    adamw, lion = rows["best of adamw"], rows["best of lion"]
    return rows | {
        RATIO: {"rate_ratio": adamw["best_rate"] / lion["best_rate"], "loss_difference": lion["loss"] - adamw["loss"]}
    }


def _label(optimizer: Optimizer, rate: float) -> str:
    return f"{optimizer}, rate {rate:g}"


def lion_rate(
    seeds: int = 3, depth: int = 3, width: int = 64, length: int = 64, batch: int = 16, steps: int = 600
) -> Study:
    """AdamW and Lion at six learning rates each, on a 3-block byte model.

    Command   thrifty study lion_rate
    Expect    Lion's best rate is 3 to 10 times lower than AdamW's. Neither best rate is at an end of its grid. At this
              small batch, Lion's loss is higher than AdamW's by several tenths of a nat. Duration: a quarter of an hour
              on two cores.
    """
    fixed = {"depth": depth, "width": width, "length": length, "batch": batch, "steps": steps}
    return Study(
        measure=measure,
        cases={
            _label(optimizer, rate): {"optimizer": optimizer, "rate": rate, **fixed}
            for optimizer, rates in RATES.items()
            for rate in rates
        },
        quantities={
            "loss": MeasuredQuantity(
                "held-out loss at the end, nats per byte; for a best rate, the minimum of the parabola"
            ),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
            "best_rate": MeasuredQuantity(
                "rate of lowest loss, by a parabola through the best of the grid and its neighbours"
            ),
            "inside": MeasuredQuantity("1 if the best of the grid is not at one of its ends, otherwise 0"),
            "rate_ratio": MeasuredQuantity("best rate of AdamW divided by best rate of Lion, per seed"),
            "loss_difference": MeasuredQuantity("lowest loss of Lion minus lowest loss of AdamW, nats per byte"),
        },
        seeds=seeds,
        derive=optima,
        expect={
            "both optima lie inside their grids": lambda c: (
                c["best of adamw"]["inside"] == c["best of lion"]["inside"] == 1
            ),
            "Lion's best rate is 3 to 10 times lower than AdamW's": lambda c: 3 <= c[RATIO]["rate_ratio"] <= 10,
            "at this small batch, Lion has the higher loss": lambda c: c[RATIO]["loss_difference"] > 0,
        },
        plots=[StudyPlot("loss", "Held-out loss by learning rate", x="rate", y="loss", by="optimizer", log_x=True)],
        minutes=12,
    )
