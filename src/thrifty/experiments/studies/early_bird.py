"""Early-bird tickets in a small language model: masks of heads and neurons agree early, and what they keep is enough.

Paper     You et al. 2020 (arXiv 1909.11957); Chen et al. 2021, EarlyBERT (arXiv 2101.00063).
Note      a model of bytes learns from nothing here. Tickets are compared by training the smaller models alone, from the
          first weights of the whole one, for as many steps each: what the search for the ticket cost stands beside it.
          One more case makes search and training one run.
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
"""The distance below which masks agree."""


def search(run: Run, seed: int) -> tuple[TrainState, list[tuple[int, float]]]:
    """Train until the ticket is drawn; the state then, and the mask distance after each step that has one."""
    state = run.start()
    curve: list[tuple[int, float]] = []
    with closing(train(run, state, seed)) as records:
        for record in records:
            if record.changes:
                break
            distances = [value for name, value in record.notes.items() if name.startswith("mask_distance")]
            curve += [(record.step, max(distances))] if distances else []
    return state, curve


def slimmed(model: nn.Module, kept: Mapping[str, Any]) -> nn.Module:
    """A whole model with the pieces of a ticket alone."""
    prune_model(model, kept)
    return model


def measure(seed: int, kind: Kind, depth: int, width: int, length: int, batch: int, steps: int) -> dict[str, float]:
    """A model trained for `steps`: the whole one, a ticket's, or search and ticket together."""
    draw = {"late": "late", "random": "random"}.get(kind, "coefficients")
    bird = EarlyBird(criterion=draw, latest=steps - 1)  # type: ignore[arg-type]
    techniques = decayed_adamw(width)

    def build() -> nn.Module:
        return llama(depth, width, length, seed, head_width=8)

    def trained(make: Any, chosen: Any) -> TrainedLanguageModel:
        return train_on_bytes(make, chosen, steps=steps, seed=seed, length=length, batch=batch)

    if kind == "whole":
        return _numbers(trained(build, techniques))
    if kind == "in one run":
        return _numbers(trained(build, (*techniques, bird)))
    plain = BaseRun(build, PackedTokens(source_text()[0], length, batch, seed), NextToken())
    run = compose(plain, [*techniques, bird], steps)
    state, curve = search(run, seed)
    drawn = state.log[-1]
    numbers = _numbers(trained(lambda: slimmed(build(), drawn.decision["kept"]), techniques))
    near = [step for step, distance in curve if distance < NEAR]
    return {
        **numbers,
        "drawn_at": drawn.step / steps,
        "near_at": near[0] / steps if near else 1.0,
        "search_seconds": state.counters["seconds"],
    }


def _numbers(trained: TrainedLanguageModel) -> dict[str, float]:
    return {"parameters": parameters_of(trained.model), "loss": trained.held_out_loss(), "seconds": trained.seconds}


def early_bird(
    seeds: int = 3, depth: int = 4, width: int = 64, length: int = 64, batch: int = 16, steps: int = 1000
) -> Study:
    """A 4-block model of bytes with 8 heads a block, and the tickets of two thirds of its heads and 60 % of its neurons
    that are drawn early, at the end of a training, and at random.

    Command   thrifty study early_bird
    Expect    masks that agree within the first quarter of the steps. One seed: drawn after 23 % of them, the early one
              came to 1.540 nats, a random one of the same sizes to 1.539 and the late one to 1.522: early, it
              gained nothing over chance. Ten minutes on two cores.
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
            "drawn_at": MeasuredQuantity("share of the steps after which the ticket was drawn"),
            "near_at": MeasuredQuantity(
                f"share of the steps after which masks were first less than {NEAR:g} apart; 1 for never"
            ),
            "search_seconds": MeasuredQuantity("seconds that the search took, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "the early ticket is drawn within the first 15 % of the steps": lambda c: c["early"]["drawn_at"] <= 0.15,
            "the early ticket's loss is within 0.02 of the late one's": lambda c: (
                abs(loss(c, "early") - loss(c, "late")) < 0.02
            ),
            "early and late tickets learn better than a random one": lambda c: (
                max(loss(c, "early"), loss(c, "late")) < loss(c, "random")
            ),
            "search and ticket in one run take less time than the whole model": lambda c: (
                c["in one run"]["seconds"] < c["whole"]["seconds"]
            ),
        },
        plots=[
            StudyPlot("loss", "Held-out loss", y="loss"),
            StudyPlot("drawn", "When the ticket was drawn", y="drawn_at"),
        ],
        minutes=10,
    )
