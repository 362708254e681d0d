"""Width and lazy training: a wider network fits random labels in fewer steps, and its weights move less.

Paper     Allen-Zhu, Li & Song 2019, A Convergence Theory for Deep Learning via Over-Parameterization (arXiv
          1811.03962); Du et al. 2019 (arXiv 1810.02054), for the two-layer network.
Note      The effect depends on the output scale 1/sqrt(width). With torch's own initialization, the weights move at any
          width. The control has contradictory labels, which no width can fit.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.data.images.digits import digits
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot, grid

Inputs = Literal["digits", "sphere"]
CONTROL = "conflicting labels"


def unit_inputs(kind: Inputs, examples: int, generator: torch.Generator) -> Tensor:
    """Return distinct inputs (n, d) of norm 1: images of handwritten digits, or random points on the sphere."""
    if kind == "sphere":
        x = torch.randn(examples, 64, generator=generator)
    else:
        images = digits().images.flatten(1)
        if len(images) < examples:
            raise UsageError(
                f"examples is {examples}, but there are only {len(images)} digits",
                fix=f"thrifty study width_lazy --set examples={len(images)}",
            )
        x = images[torch.randperm(len(images), generator=generator)[:examples]]
    return x / x.norm(dim=1, keepdim=True)


def forward(x: Tensor, weight: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return f(x) = output · relu(weight x) of n inputs (n,), and a mask (n, m) that is True where one of m units is
    active. `output` (m,) contains ±1/sqrt(m).
    """
    before = x @ weight.mT
    on = before > 0
    return (before * on) @ output, on


def measure(
    seed: int, width: int, inputs: Inputs, examples: int, rate: float, goal: float, most_steps: int, conflicts: int
) -> dict[str, float]:
    """Train the first layer by full-batch gradient descent until half the mean squared error is at most `goal`.

    The last `conflicts` inputs repeat the inputs before them, with the opposite labels.
    """
    generator = torch.Generator().manual_seed(seed)
    x = unit_inputs(inputs, examples, generator)
    labels = torch.randint(0, 2, (examples,), generator=generator) * 2.0 - 1
    if conflicts:
        x[-conflicts:] = x[-2 * conflicts : -conflicts]
        labels[-conflicts:] = -labels[-2 * conflicts : -conflicts]
    start = torch.randn(width, x.shape[1], generator=generator)
    output = (torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1) / math.sqrt(width)
    weight, on_at_start = start.clone(), forward(x, start, output)[1]
    for step in range(most_steps + 1):
        outputs, on = forward(x, weight, output)
        error = outputs - labels
        loss = float(error.square().mean() / 2)
        if loss <= goal or step == most_steps:
            break
        weight -= rate / examples * (on * output * error[:, None]).mT @ x
    moved = weight - start
    return {
        "steps": step if loss <= goal else math.inf,
        "loss": loss,
        "movement": float(moved.norm() / start.norm()),
        "largest_movement": float(moved.norm(dim=1).max()),
        "flips": float((on != on_at_start).float().mean()),
    }


def width_lazy(
    seeds: int = 5,
    widths: tuple[int, ...] = (16, 64, 256, 1024, 4096),
    inputs: Inputs = "digits",
    examples: int = 200,
    most_steps: int = 40_000,
) -> Study:
    """A two-layer network fits random labels of 200 digits at five widths; a sixth case has contradictory labels.

    Command   thrifty study width_lazy
    Expect    From width 16 to 4096, the number of steps falls to about a third. The relative movement of the weights
              falls about as 1/sqrt(width), from several times their norm to a fifth. Contradictory labels are never
              fitted. Duration: about five minutes on two cores.
    """
    fixed = {"inputs": inputs, "examples": examples, "rate": 10.0, "goal": 0.025, "most_steps": most_steps}
    cases = {label: {**levels, **fixed, "conflicts": 0} for label, levels in grid(width=widths).items()}
    cases[CONTROL] = {"width": max(16, widths[-1] // 4), **fixed, "conflicts": examples // 10}
    cases[CONTROL]["most_steps"] = most_steps // 2
    labels = [label for label in cases if label != CONTROL]
    narrow, wide = labels[0], labels[-1]

    def falls(cells: Cells, name: str) -> bool:
        values = [cells[label][name] for label in labels]
        return values == sorted(values, reverse=True)

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "steps": MeasuredQuantity("steps until half the mean squared error is 0.025"),
            "loss": MeasuredQuantity("half the mean squared error at the end"),
            "movement": MeasuredQuantity("norm of the weight change divided by the norm of the initial weights"),
            "largest_movement": MeasuredQuantity("largest norm of the weight change of one unit"),
            "flips": MeasuredQuantity("fraction of (input, unit) pairs whose ReLU switched"),
        },
        seeds=seeds,
        expect={
            "the widest network requires at most half of the steps of the narrowest one": lambda c: (
                c[wide]["steps"] <= 0.5 * c[narrow]["steps"]
            ),
            "the relative movement falls from each width to the next": lambda c: falls(c, "movement"),
            "the largest movement of a unit falls too": lambda c: falls(c, "largest_movement"),
            "contradictory labels are never fitted": lambda c: math.isinf(c[CONTROL]["steps"]),
        },
        plots=[
            StudyPlot(
                "movement",
                "Relative movement of the weights",
                x="width",
                y="movement",
                by="conflicts",
                log_x=True,
                log_y=True,
            ),
            StudyPlot("steps", "Steps until the labels are fitted", x="width", y="steps", by="conflicts", log_x=True),
            StudyPlot("flips", "Fraction of ReLUs that switched", x="width", y="flips", by="conflicts", log_x=True),
        ],
        minutes=5,
    )
