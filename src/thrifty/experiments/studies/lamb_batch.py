"""LAMB compared with AdamW on an equal number of sequences: LAMB's advantage for large batches and few steps.

Paper     You et al. 2020, Large Batch Optimization for Deep Learning (arXiv 1904.00962). Nado et al. 2021 (2102.06356)
          reach the same results with well-tuned Adam.
Note      Each optimizer uses the best of five learning rates, a factor of two apart, so small differences are not
          decisive. Gradients are clipped for both optimizers, and each optimizer has its own betas. At batch 16,
          exchanging the betas changed the loss by at most about 0.01.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from thrifty.core.plain_values import build
from thrifty.core.technique import Technique
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.language_task import train_llama
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.optimizers.lamb import Lamb
from thrifty.techniques.schedules.linear import LinearDecay

Optimizer = Literal["adamw", "lamb"]
OPTIMIZERS: Mapping[Optimizer, type[Technique]] = {"adamw": AdamW, "lamb": Lamb}
RATES: Mapping[Optimizer, Sequence[float]] = {
    "adamw": (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2),
    "lamb": (1e-2, 2e-2, 4e-2, 8e-2, 1.6e-1),
}


def measure(
    seed: int, optimizer: Optimizer, batch: int, rate: float, sequences: int, depth: int, width: int, length: int
) -> dict[str, float]:
    """Return the held-out loss after `sequences` sequences at the peak learning rate `rate`. Warm-up takes a tenth of
    the run, then the learning rate decays.
    """
    settings = {"lr": rate, "weight_decay": 0.01}
    chosen: list[Technique] = [
        build(OPTIMIZERS[optimizer], settings),
        LinearDecay(warmup=0.1),
        GradientClipping(),
    ]
    steps = max(1, sequences // batch)
    trained = train_llama(chosen, steps=steps, seed=seed, depth=depth, width=width, length=length, batch=batch)
    return {"loss": trained.held_out_loss(), "steps": len(trained.losses), "seconds": trained.seconds}


def optima(batches: Sequence[int], cells: Cells) -> Cells:
    """Return, for each batch size, the best learning rate of each optimizer, and LAMB's advantage over AdamW."""
    rows: dict[str, dict[str, float]] = {}
    for batch in batches:
        best = {}
        for optimizer, rates in RATES.items():
            losses = [cells[_label(optimizer, batch, rate)]["loss"] for rate in rates]
            best[optimizer] = min(losses)
            rows[_best(optimizer, batch)] = {
                "best_rate": rates[losses.index(best[optimizer])],
                "inside": float(min(losses[0], losses[-1]) > best[optimizer]),
                "loss": best[optimizer],
            }
        rows[_comparison(batch)] = {"batch": batch, "lamb_gain": best["adamw"] - best["lamb"]}
    return rows


def _label(optimizer: Optimizer, batch: int, rate: float) -> str:
    return f"{optimizer}, batch {batch}, rate {rate:g}"


def _best(optimizer: Optimizer, batch: int) -> str:
    return f"best of {optimizer}, batch {batch}"


def _comparison(batch: int) -> str:
    return f"LAMB against AdamW, batch {batch}"


def lamb_batch(
    seeds: int = 3,
    batches: tuple[int, ...] = (16, 64, 256),
    sequences: int = 9600,
    depth: int = 3,
    width: int = 64,
    length: int = 64,
) -> Study:
    """AdamW and LAMB at five learning rates each, on 9600 sequences in batches of 16, 64 and 256.

    Command   thrifty study lamb_batch
    Expect    LAMB's advantage over AdamW grows with the batch, to about 0.2 nats at batch 256 (37 steps). Other small
              studies suggest that AdamW is better at batch 16. Here, in one seed, LAMB's loss was lower by 0.04 than
              AdamW's at batch 16, too. Duration: a quarter of an hour on two cores.
    """
    fixed = {"sequences": sequences, "depth": depth, "width": width, "length": length}

    def gain(cells: Cells, batch: int) -> float:
        return cells[_comparison(batch)]["lamb_gain"]

    return Study(
        measure=measure,
        cases={
            _label(optimizer, batch, rate): {"optimizer": optimizer, "batch": batch, "rate": rate, **fixed}
            for batch in batches
            for optimizer, rates in RATES.items()
            for rate in rates
        },
        quantities={
            "loss": MeasuredQuantity("held-out loss at the end, nats per byte"),
            "steps": MeasuredQuantity("steps of training"),
            "best_rate": MeasuredQuantity("the best rate, per seed"),
            "inside": MeasuredQuantity("1 if the best rate is not at an end of its grid, otherwise 0"),
            "batch": MeasuredQuantity("sequences per step"),
            "lamb_gain": MeasuredQuantity(
                "lowest loss of AdamW minus lowest loss of LAMB, nats per byte; positive if LAMB is better"
            ),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        derive=partial(optima, batches),
        expect={
            "no best rate is at an end of its grid": lambda c: all(
                c[_best(optimizer, batch)]["inside"] == 1 for optimizer in RATES for batch in batches
            ),
            "AdamW has the lower loss at the smallest batch": lambda c: gain(c, batches[0]) < 0,
            "LAMB has the lower loss at the largest batch": lambda c: gain(c, batches[-1]) > 0,
            "LAMB's lead grows from each batch to the next": lambda c: all(
                gain(c, one) < gain(c, other) for one, other in pairwise(batches)
            ),
        },
        plots=[StudyPlot("gain", "Lead of LAMB over AdamW, nats per byte", x="batch", y="lamb_gain", log_x=True)],
        minutes=15,
    )
