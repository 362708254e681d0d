"""Lottery tickets on digits: a pruned network with its original initialization trains as well as the dense network.

Paper     Frankle & Carbin 2019, The Lottery Ticket Hypothesis (arXiv 1803.03635).
Note      The paper prunes 20 % per round, and this study 37 %. After nine rounds of 20 %, this wide network would have
          a density of 13 %, at which any mask learns the digits. The head loses half the fraction, as in the paper's
          fully connected networks. All rounds run in one process without run folders. `thrifty lottery` runs the same
          rounds with run folders.
"""

import hashlib
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from thrifty.composition.compose import CPU, BaseRun, compose
from thrifty.data.epoch_sampler import HeldOutExamples
from thrifty.data.images.digits import DigitEpochs, DigitImages
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot, grid
from thrifty.experiments.tasks.digits_task import accuracy, decayed_sgd, perceptron
from thrifty.experiments.tasks.whole_run import run_to_end
from thrifty.objectives.classification import Classification
from thrifty.techniques.sparsity.mask_from_file import MaskFromFile, density_of, mask_file_bytes, prune_by_magnitude
from thrifty.training.evaluation import held_out_loss

Kind = Literal["ticket", "other initial values", "random mask"]
KINDS: tuple[Kind, ...] = ("ticket", "other initial values", "random mask")
CONTROL: dict[Kind, Literal["", "reinitialise", "random-mask"]] = {
    "ticket": "", "other initial values": "reinitialise", "random mask": "random-mask",
}  # fmt: skip
DENSE = "dense"


class LotteryRound(NamedTuple):
    masks: dict[str, Tensor]
    """Masks used in training."""
    weights: dict[str, Tensor]
    """Matrices at the end of training, by name."""
    numbers: dict[str, float]


def trained(masks: dict[str, Tensor], kind: Kind, seed: int, width: int, steps: int, batch: int) -> LotteryRound:
    """Train the network of a seed with masks, or with the control run `kind` of these masks. All kinds train on the
    same batches."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ticket.safetensors")
        file.write_bytes(mask_file_bytes(masks, "a round of this study", {}))
        ticket = MaskFromFile(
            file=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest(), control=CONTROL[kind], seed=seed
        )
        plain = BaseRun(lambda: perceptron(width, seed), DigitEpochs("train", batch, seed), Classification())
        run = compose(plain, [*decayed_sgd(), ticket], steps)
        model, state = run_to_end(run, seed)
    test = HeldOutExamples(DigitImages("test")).batches(497, 497)
    numbers = {
        "density": density_of(masks),
        "accuracy": accuracy(model),
        "loss": held_out_loss(model, run.eval_objective, test, CPU),
        "seconds": state.counters["seconds"],
    }
    return LotteryRound(masks, matrices(model), numbers)


def matrices(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.ndim == 2}


@lru_cache(maxsize=32)
def round_of(number: int, seed: int, prune: float, width: int, steps: int, batch: int) -> LotteryRound:
    """Return the trained ticket after `number` rounds; round 0 is the dense network. Earlier rounds are cached."""
    if number:
        before = round_of(number - 1, seed, prune, width, steps, batch)
        head = [*before.weights][-1]
        masks = dict(prune_by_magnitude(before.weights, before.masks, prune, "layerwise", [head]))
    else:
        first = matrices(perceptron(width, seed))
        masks = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in first.items()}
    return trained(masks, "ticket", seed, width, steps, batch)


def measure(seed: int, kind: Kind, rounds: int, prune: float, width: int, steps: int, batch: int) -> dict[str, float]:
    ticket = round_of(rounds, seed, prune, width, steps, batch)
    return (ticket if kind == "ticket" else trained(ticket.masks, kind, seed, width, steps, batch)).numbers


def lottery_ticket(
    seeds: int = 3,
    rounds: tuple[int, ...] = (2, 4, 5, 7, 9),
    prune: float = 0.37,
    width: int = 256,
    steps: int = 1500,
    batch: int = 64,
) -> Study:
    """Digits with a network of three hidden layers, pruned in nine rounds.

    Controls are the same masks with another initialization, and random masks of equal density.

    Command   thrifty study lottery_ticket
    Expect    At a density of 10 % and less, the ticket has the lowest loss. Its mask with another initialization is
              second, and a random mask is last. In this study, the last two differ only at a density of 2 %. Duration:
              five minutes on two cores.
    """
    fixed = {"prune": prune, "width": width, "steps": steps, "batch": batch}
    cases = {DENSE: {"kind": "ticket", "rounds": 0, **fixed}}
    cases |= {label: {**levels, **fixed} for label, levels in grid(kind=KINDS, rounds=rounds).items()}
    last = rounds[-1]

    def at(cells: Cells, kind: Kind, name: str, number: int = last) -> float:
        return cells[f"kind {kind}, rounds {number}"][name]

    def in_order(cells: Cells, kinds: tuple[Kind, ...]) -> bool:
        losses = [[at(cells, kind, "loss", number) for kind in kinds] for number in few]
        return all(each == sorted(each) for each in losses)

    most = [number for number in rounds if 0.1 < (1 - prune) ** number <= 0.2] or [rounds[0]]
    few = [number for number in rounds if (1 - prune) ** number <= 0.1] or [last]
    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "density": MeasuredQuantity("fraction of the weights of all matrices that remain"),
            "accuracy": MeasuredQuantity("test accuracy, percent"),
            "loss": MeasuredQuantity("cross-entropy on the test images, nats"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "at 10 % and less, the ticket has a lower loss than its mask with another initialization": lambda c: (
                in_order(c, KINDS[:2])
            ),
            "at 10 % and less, the mask with another initialization has a lower loss than a random mask": lambda c: (
                in_order(c, KINDS[1:])
            ),
            "at 10 % and less, the ticket has a lower loss than a random mask": lambda c: in_order(
                c, ("ticket", "random mask")
            ),
            "with the fewest weights, the ticket has the highest accuracy and a random mask the lowest": lambda c: (
                at(c, "ticket", "accuracy")
                > at(c, "other initial values", "accuracy")
                > at(c, "random mask", "accuracy")
            ),
            "a ticket of 10 to 20 % stays within one point of the dense network's accuracy": lambda c: all(
                at(c, "ticket", "accuracy", n) > c[DENSE]["accuracy"] - 1 for n in most
            ),
        },
        plots=[
            StudyPlot("loss", "Loss on the test images", x="density", y="loss", by="kind", log_x=True, log_y=True),
            StudyPlot("accuracy", "Test accuracy, percent", x="density", y="accuracy", by="kind", log_x=True),
        ],
        minutes=5,
    )
