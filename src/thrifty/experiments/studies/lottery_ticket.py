"""Lottery tickets on digits: what is left of a trained network learns from its own first values as well as the whole.

Paper     Frankle & Carbin 2019, The Lottery Ticket Hypothesis (arXiv 1803.03635).
Note      the paper takes 20 % a round; here 37 %, since nine such rounds of a network this wide end at 13 %, where any
          mask learns digits. The head loses half of it, as in the paper's fully connected networks. Rounds are gone
          through within a process, without run folders; `thrifty lottery` does the same with them.
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

Kind = Literal["ticket", "other first values", "random mask"]
KINDS: tuple[Kind, ...] = ("ticket", "other first values", "random mask")
CONTROL: dict[Kind, Literal["", "reinitialise", "random-mask"]] = {
    "ticket": "", "other first values": "reinitialise", "random mask": "random-mask",
}  # fmt: skip
DENSE = "dense"


class LotteryRound(NamedTuple):
    masks: dict[str, Tensor]
    """Under which it was trained."""
    weights: dict[str, Tensor]
    """At the end, by name: matrices alone."""
    numbers: dict[str, float]


def trained(masks: dict[str, Tensor], kind: Kind, seed: int, width: int, steps: int, batch: int) -> LotteryRound:
    """The network of a seed, trained under masks or a control of them; always on the same images in the same order."""
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
    """The ticket after so many rounds, trained; 0 is the dense network. Rounds before it are kept for the next ones."""
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
    """Digits by a network of three hidden layers, pruned in nine rounds, against the same masks with other first
    values, and masks as dense at random places.

    Command   thrifty study lottery_ticket
    Expect    at 10 % of the weights and below the ticket has the least loss, its mask with other first values comes
              next, and a random mask is worst (here the last two part at 2 % only). Five minutes on two cores.
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
            "density": MeasuredQuantity("share of the weights left, of all matrices"),
            "accuracy": MeasuredQuantity("percent of the test images that are told right"),
            "loss": MeasuredQuantity("cross-entropy of the test images, nats"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "at 10 % and less the loss of the ticket is below that of its mask with other first values": lambda c: (
                in_order(c, KINDS[:2])
            ),
            "at 10 % and less the loss of its mask with other first values is below that of a random mask": lambda c: (
                in_order(c, KINDS[1:])
            ),
            "at 10 % and less the loss of the ticket is below that of a random mask": lambda c: in_order(
                c, ("ticket", "random mask")
            ),
            "with the fewest weights the ticket is the most accurate, a random mask the least": lambda c: (
                at(c, "ticket", "accuracy") > at(c, "other first values", "accuracy") > at(c, "random mask", "accuracy")
            ),
            "a ticket of 10 to 20 % stays within a percent of the dense network's accuracy": lambda c: all(
                at(c, "ticket", "accuracy", n) > c[DENSE]["accuracy"] - 1 for n in most
            ),
        },
        plots=[
            StudyPlot("loss", "Loss of the test images", x="density", y="loss", by="kind", log_x=True, log_y=True),
            StudyPlot("accuracy", "Test images told right, percent", x="density", y="accuracy", by="kind", log_x=True),
        ],
        minutes=5,
    )
