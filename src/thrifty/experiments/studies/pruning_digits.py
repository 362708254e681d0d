"""Pruning digits: the selection of weights matters more at lower densities.

Papers    Lee et al. 2019, SNIP (arXiv 1810.02340); Wang et al. 2020, GraSP (2002.07376); Mocanu et al. 2018, SET
          (1707.04780); Evci et al. 2020, RigL (1911.11134), which also compares SNIP and SET.
Note      The output layer is also masked, and is the first layer that collapses. Pixels are standardized. With pixels
          in [0, 1] and a random mask of 2 %, the network had not begun to learn after 1500 steps (one seed). Weights
          have He initialization; biases are zero. GraSP starts from Xavier initialization, as in its paper. From He
          initialization, GraSP's mask at 10 % did not train (two seeds).
"""

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.technique import Technique
from thrifty.data.images.digits import DigitEpochs
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.digits_task import accuracy, decayed_sgd, perceptron
from thrifty.experiments.tasks.whole_run import run_to_end
from thrifty.objectives.classification import Classification
from thrifty.optim.weight_masks import masks_in
from thrifty.techniques.sparsity.grasp import Grasp
from thrifty.techniques.sparsity.rigl import Rigl
from thrifty.techniques.sparsity.set import SparseEvolution
from thrifty.techniques.sparsity.snip import Snip
from thrifty.techniques.sparsity.static import StaticMask

DENSE = "dense"
METHODS = (
    "static, uniform", "static, ERK", "magnitude, global", "SNIP", "GraSP", "SET", "RigL",
)  # fmt: skip
EVERY = r"weight$"
"""Pattern that matches all matrices of the network, including the head."""


def masking(method: str, density: float, every: int, seed: int) -> list[Technique]:
    """Return the pruning techniques of a method; an empty list for "dense"."""
    moves = {"density": density, "where": EVERY, "every": every, "seed": seed}
    choices: dict[str, Technique] = {
        "static, uniform": StaticMask(density=density, where=EVERY, distribution="uniform", seed=seed),
        "static, ERK": StaticMask(density=density, where=EVERY, seed=seed),
        "magnitude, global": StaticMask(density=density, where=EVERY, criterion="magnitude", distribution="global"),
        "SNIP": Snip(density=density, where=EVERY),
        "GraSP": Grasp(density=density, where=EVERY),
        "SET": SparseEvolution(**moves),
        "RigL": Rigl(**moves),
    }
    return [] if method == DENSE else [choices[method]]


def measure(seed: int, method: str, density: float, width: int, steps: int, batch: int, every: int) -> dict[str, float]:
    """Return the accuracy, the lowest layer density, and the seconds of one network."""
    plain = BaseRun(
        lambda: perceptron(width, seed, method == "GraSP"), DigitEpochs("train", batch, seed), Classification()
    )
    run = compose(plain, [*decayed_sgd(), *masking(method, density, every, seed)], steps)
    model, state = run_to_end(run, seed, may_diverge=True)
    densities = [float(mask.float().mean()) for mask in masks_in(state).values()]
    return {
        "accuracy": accuracy(model),
        "least_density": min(densities, default=1.0),
        "seconds": state.counters["seconds"],
    }


def label_of(method: str, density: float) -> str:
    return f"{method}, {100 * density:g} %"


def pruning_digits(
    seeds: int = 5,
    densities: tuple[float, ...] = (0.1, 0.02, 0.005),
    width: int = 256,
    steps: int = 1500,
    batch: int = 64,
    every: int = 50,
) -> Study:
    """Seven pruning methods on 1,300 digits. They keep 10, 2 and 0.5 % of the weights of a perceptron with three hidden
    layers.

    Command   thrifty study pruning_digits
    Expect    At 10 %, all methods except GraSP are within two points of the dense network's 98 %. At 2 %, uniform
              random masks and initial magnitudes collapse. ERK is much better, and SET's random growth is better still.
              RigL, SNIP and GraSP stay near 96 %. At 0.5 %, SNIP and GraSP are above 50 %, static masks below.
              Duration: ten minutes on two cores.
    """
    fixed = {"width": width, "steps": steps, "batch": batch, "every": every}
    cases = {DENSE: {"method": DENSE, "density": 1.0, **fixed}} | {
        label_of(method, density): {"method": method, "density": density, **fixed}
        for density in densities
        for method in METHODS
    }

    def right(cells: Cells, method: str, density: float) -> float:
        return cells[label_of(method, density)]["accuracy"]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "accuracy": MeasuredQuantity("test accuracy at the end, percent"),
            "least_density": MeasuredQuantity("lowest density of any layer; 0 means a disconnected network"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "at 10 %, all methods but GraSP stay within two points of dense": lambda c: all(
                right(c, method, 0.1) > c[DENSE]["accuracy"] - 2 for method in METHODS if method != "GraSP"
            ),
            "at 10 %, GraSP is worse than SNIP; at 2 %, it is at most one point below SNIP": lambda c: (
                right(c, "GraSP", 0.1) < right(c, "SNIP", 0.1) and right(c, "GraSP", 0.02) > right(c, "SNIP", 0.02) - 1
            ),
            "at 2 %, ERK beats uniform by more than 20 points": lambda c: (
                right(c, "static, ERK", 0.02) > right(c, "static, uniform", 0.02) + 20
            ),
            "at 2 %, RigL beats SET, and SET beats the static mask": lambda c: (
                right(c, "RigL", 0.02) > right(c, "SET", 0.02) > right(c, "static, ERK", 0.02)
            ),
            "at 2 %, a global threshold on initial weights collapses: below 50 %": lambda c: (
                right(c, "magnitude, global", 0.02) < 50
            ),
            "at 0.5 %, SNIP and GraSP are above 50 %, static masks and initial magnitudes below": lambda c: (
                min(right(c, method, 0.005) for method in ("SNIP", "GraSP"))
                > 50
                > max(right(c, method, 0.005) for method in METHODS[:3])
            ),
        },
        plots=[
            StudyPlot(
                "accuracy",
                "Test accuracy by density",
                x="density",
                y="accuracy",
                by="method",
                log_x=True,
            ),
        ],
        minutes=10,
    )
