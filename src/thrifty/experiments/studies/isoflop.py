"""IsoFLOP: at each compute budget, the loss has a minimum at some model size. That size grows with compute.

Paper     Hoffmann et al. 2022, Training Compute-Optimal Large Language Models (arXiv 2203.15556), approach 2.
Note      The learning rate decays until the end of each run, because a run that stops within its schedule is not
          comparable. Compute is 6 · parameters · tokens, with all parameters counted.
"""

import math
from collections.abc import Sequence
from functools import partial

from thrifty.experiments.study import Cells, MeasuredQuantity, Numbers, Study, StudyPlot
from thrifty.experiments.tasks.language_task import decayed_adamw, llama, parameters_of, steps_for, train_llama
from thrifty.planning import isoflop_analysis
from thrifty.planning.scaling_law_fit import TrainedRun

SIZES = ((2, 12), (2, 20), (2, 32), (3, 40), (3, 54))
"""Depth and width of the models. They have 7 to 120 thousand parameters; each model is about twice as large as the
previous one.
"""
EXPONENT = "exponent"


def measure(seed: int, depth: int, width: int, flops: float, length: int, batch: int) -> dict[str, float]:
    """Return the held-out loss of a model that is trained with compute `flops`."""
    parameters = parameters_of(llama(depth, width, length, seed))
    steps = steps_for(flops, parameters, length * batch)
    trained = train_llama(
        decayed_adamw(width), steps=steps, seed=seed, depth=depth, width=width, length=length, batch=batch
    )
    return {
        "parameters": parameters,
        "tokens": trained.tokens,
        "loss": trained.held_out_loss(),
        "seconds": trained.seconds,
    }


def optima(budgets: Sequence[float], cells: Cells) -> Cells:
    """Return the minimum of each budget's parabola, if the sizes enclose a minimum, and the scaling exponent over all
    budgets.
    """
    runs = {
        flops: [
            TrainedRun(cell["parameters"], cell["tokens"], cell["loss"])
            for cell in (cells[_label(flops, *size)] for size in SIZES)
            if math.isfinite(cell["loss"])
        ]
        for flops in budgets
    }
    rows: dict[str, Numbers] = {}
    for flops in budgets:
        valley = isoflop_analysis.find_valley(runs[flops])
        if isinstance(valley, isoflop_analysis.IsoFlopParabola):
            optimum = {"optimal_parameters": valley.parameters, "flops": valley.flops, "loss": valley.loss}
            rows[_optimum(flops)] = optimum
    if len(rows) > 1:
        together = [run for group in runs.values() for run in group]
        rows[EXPONENT] = {"exponent": isoflop_analysis.isoflop(together).exponent}
    return rows


def _label(flops: float, depth: int, width: int) -> str:
    return f"{flops:.1e} FLOP, {depth} x {width}"


def _optimum(flops: float) -> str:
    return f"optimum at {flops:.1e} FLOP"


def isoflop(
    seeds: int = 3, budgets: tuple[float, ...] = (1e11, 2.5e11, 6e11, 1.5e12), length: int = 64, batch: int = 8
) -> Study:
    """Five sizes of a Llama-style byte model at four compute budgets.

    Command   thrifty study isoflop
    Expect    The best size grows from each budget to the next, with an exponent of about 0.5. Duration: about twenty
              minutes on two cores.
    """
    cases = {
        _label(flops, depth, width): {
            "depth": depth, "width": width, "flops": flops, "length": length, "batch": batch
        }
        for flops in budgets
        for depth, width in SIZES
    }  # fmt: skip

    def sizes(cells: Cells) -> list[float]:
        return [cells[_optimum(flops)]["optimal_parameters"] for flops in budgets]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "parameters": MeasuredQuantity("all parameters"),
            "tokens": MeasuredQuantity("bytes trained on"),
            "loss": MeasuredQuantity(
                "held-out loss at the end, nats per byte; for an optimum, the minimum of the parabola"
            ),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
            "optimal_parameters": MeasuredQuantity("size at the minimum of the budget's parabola in log size"),
            "flops": MeasuredQuantity("compute actually used for the budget, FLOP"),
            "exponent": MeasuredQuantity("exponent of compute in the optimal size"),
        },
        seeds=seeds,
        derive=partial(optima, budgets),
        expect={
            "the optimal size grows from each budget to the next": lambda c: sizes(c) == sorted(set(sizes(c))),
            "the scaling exponent is between 0.3 and 0.8 (literature: about 0.5)": lambda c: (
                0.3 <= c[EXPONENT]["exponent"] <= 0.8
            ),
        },
        plots=[
            StudyPlot("loss", "Held-out loss by size at each budget", x="parameters", y="loss", by="flops", log_x=True),
            StudyPlot("optimum", "Optimal size by compute", x="flops", y="optimal_parameters", log_x=True, log_y=True),
        ],
        minutes=20,
    )
