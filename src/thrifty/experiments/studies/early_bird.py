"""Early-bird tickets in a small language model: masks of heads and neurons converge early, and an early ticket is
sufficient.

Paper     You et al. 2020 (arXiv 1909.11957); Chen et al. 2021, EarlyBERT (arXiv 2101.00063).
Note      A byte model is trained from scratch. Tickets are compared by training the smaller models from the dense
          model's initialization with equal steps. The cost of the search is reported separately. One additional case
          combines search and training in one run.
"""

from collections.abc import Mapping
from contextlib import closing
from typing import Any, Literal

from torch import nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.state import TrainState
from thrifty.data.text.token_windows import PackedTokens
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.language_task import (
    TrainedLanguageModel,
    decayed_adamw,
    llama,
    parameters_of,
    source_text,
    train_on_bytes,
)
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.sparsity.early_bird import EarlyBird, prune_model
from thrifty.training.loop import train

Kind = Literal["whole", "early", "late", "random", "in one run"]
TICKETS: tuple[Kind, ...] = ("early", "late", "random")
NEAR = 0.1
"""Distance between two masks below which they count as equal."""


def search(run: Run, seed: int) -> tuple[TrainState, list[tuple[int, float]]]:
    """Train until the ticket is chosen. Return the state, and pairs of (step, mask distance)."""
    state = run.start()
    curve: list[tuple[int, float]] = []
    with closing(train(run, state, seed)) as records:
        for record in records:
            if record.changes:
                break
            distances = [value for name, value in record.notes.items() if name.startswith("mask_distance")]
            curve += [(record.step, max(distances))] if distances else []
    return state, curve


def prune_to(model: nn.Module, ticket: Mapping[str, Any]) -> nn.Module:
    """Return a dense model that keeps only the heads and neurons of a ticket."""
    prune_model(model, ticket)
    return model


def measure(seed: int, kind: Kind, depth: int, width: int, length: int, batch: int, steps: int) -> dict[str, float]:
    """Train for `steps` steps: the whole model, a ticket, or search and ticket in one run."""
    criterion = {"late": "late", "random": "random"}.get(kind, "coefficients")
    bird = EarlyBird(criterion=criterion, latest=steps - 1)  # type: ignore[arg-type]
    techniques = decayed_adamw(width)

    def build() -> nn.Module:
        return llama(depth, width, length, seed, head_width=8)

    def trained(make: Any, chosen: Any) -> TrainedLanguageModel:
        return train_on_bytes(make, chosen, steps=steps, seed=seed, length=length, batch=batch)

    if kind == "whole":
        return _summary(trained(build, techniques))
    if kind == "in one run":
        return _summary(trained(build, (*techniques, bird)))
    plain = BaseRun(build, PackedTokens(source_text()[0], length, batch, seed), NextToken())
    run = compose(plain, [*techniques, bird], steps)
    state, curve = search(run, seed)
    change = state.log[-1]
    numbers = _summary(trained(lambda: prune_to(build(), change.decision["kept"]), techniques))
    near = [step for step, distance in curve if distance < NEAR]
    return {
        **numbers,
        "drawn_at": change.step / steps,
        "near_at": near[0] / steps if near else 1.0,
        "search_seconds": state.counters["seconds"],
    }


def _summary(trained: TrainedLanguageModel) -> dict[str, float]:
    return {"parameters": parameters_of(trained.model), "loss": trained.held_out_loss(), "seconds": trained.seconds}


def early_bird(
    seeds: int = 3, depth: int = 4, width: int = 64, length: int = 64, batch: int = 16, steps: int = 1000
) -> Study:
    """A 4-block byte model with 8 heads per block. Tickets keep two thirds of its heads and 60 % of its neurons.

    The tickets are chosen early, at the end of a training run, and at random.

    Command   thrifty study early_bird
    Expect    The masks agree within the first quarter of the steps. In one seed, the early ticket, chosen after 23 % of
              the steps, reached 1.540 nats. A random ticket of equal size reached 1.539 nats, and the late ticket 1.522
              nats. The early ticket was no better than the random ticket. Duration: ten minutes on two cores.
    """
    fixed = {"depth": depth, "width": width, "length": length, "batch": batch, "steps": steps}
    kinds: tuple[Kind, ...] = ("whole", *TICKETS, "in one run")

    def loss(cells: Cells, kind: Kind) -> float:
        return cells[kind]["loss"]

    return Study(
        measure=measure,
        cases={kind: {"kind": kind, **fixed} for kind in kinds},
        quantities={
            "parameters": MeasuredQuantity("parameters trained at the end"),
            "loss": MeasuredQuantity("held-out loss at the end, nats per byte"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
            "drawn_at": MeasuredQuantity("fraction of the steps before the ticket was chosen"),
            "near_at": MeasuredQuantity(
                f"fraction of the steps before masks were first less than {NEAR:g} apart; 1 for never"
            ),
            "search_seconds": MeasuredQuantity("seconds of the search, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "the early ticket is chosen within the first 15 % of the steps": lambda c: c["early"]["drawn_at"] <= 0.15,
            "the losses of the early and the late ticket differ by less than 0.02": lambda c: (
                abs(loss(c, "early") - loss(c, "late")) < 0.02
            ),
            "the early and the late ticket have a lower loss than a random one": lambda c: (
                max(loss(c, "early"), loss(c, "late")) < loss(c, "random")
            ),
            "search and ticket in one run take less time than the whole model": lambda c: (
                c["in one run"]["seconds"] < c["whole"]["seconds"]
            ),
        },
        plots=[
            StudyPlot("loss", "Held-out loss", y="loss"),
            StudyPlot("drawn", "Step at which the ticket was chosen, as a fraction", y="drawn_at"),
        ],
        minutes=10,
    )
