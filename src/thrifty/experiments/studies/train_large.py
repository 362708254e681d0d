"""Train large, then compress: with more compute, wider models have a lower loss and can be pruned afterwards.

Paper     Li et al. 2020, Train Large, Then Compress (arXiv 2002.11794).
Note      The paper prunes with further training. Here, weights are set to zero once without further training, which is
          the hardest test of the claim.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from thrifty.experiments.study import Cells, MeasuredQuantity, Numbers, Study, StudyPlot
from thrifty.experiments.tasks.language_task import decayed_adamw, llama, parameters_of, steps_for, train_llama
from thrifty.modeling.parameter_kinds import is_matrix


def block_matrices(model: nn.Module) -> list[Tensor]:
    """Return the weights to prune: all matrices of the blocks, without embedding, head and norms."""
    return [p for name, p in model.named_parameters() if name.startswith("blocks.") and is_matrix(name, p)]


@torch.no_grad()
def keep_largest(weights: list[Tensor], kept: int) -> None:
    """Set all elements to zero except the `kept` elements of largest magnitude over all tensors."""
    sizes = torch.cat([weight.abs().flatten() for weight in weights])
    if kept < len(sizes):
        threshold = sizes.kthvalue(len(sizes) - kept).values
        for weight in weights:
            weight.mul_(weight.abs() > threshold)


def measure(
    seed: int, depth: int, width: int, flops: float, length: int, batch: int, narrower: int | None = None
) -> dict[str, float]:
    """Train a model with compute `flops`. Return the loss of the dense model, with half of its block weights, and with
    as many block weights as a model of width `narrower`.
    """
    parameters = parameters_of(llama(depth, width, length, seed))
    steps = steps_for(flops, parameters, length * batch)
    trained = train_llama(
        decayed_adamw(width), steps=steps, seed=seed, depth=depth, width=width, length=length, batch=batch
    )
    numbers = {
        "parameters": parameters,
        "steps": len(trained.losses),
        "loss": trained.held_out_loss(),
        "seconds": trained.seconds,
    }
    weights = block_matrices(trained.model)
    keep_largest(weights, sum(weight.numel() for weight in weights) // 2)
    numbers["halved_loss"] = trained.held_out_loss()
    if narrower:  # narrower models have fewer than half of the weights, so pruning can continue from here
        keep_largest(weights, sum(weight.numel() for weight in block_matrices(llama(depth, narrower, length, seed))))
        numbers["cut_loss"] = trained.held_out_loss()
    return numbers


def train_large(
    seeds: int = 3,
    widths: tuple[int, ...] = (16, 32, 64, 96),
    budgets: tuple[float, ...] = (1e11, 3e11, 9e11),
    depth: int = 3,
    length: int = 64,
    batch: int = 8,
) -> Study:
    """Llama-style byte models at four widths and three compute budgets, then pruned by magnitude.

    Command   thrifty study train_large
    Expect    The best width grows with the budget. If half of the weights are pruned, a wider model loses less than a
              narrower model. The paper claims that a wide model, pruned to the size of a narrow model, is better than
              the narrow model. One-shot pruning at these sizes is not expected to confirm this. Duration: a quarter of
              an hour on two cores.
    """
    cases = {}
    for flops in budgets:
        for narrow, width in pairwise((None, *widths)):
            settings = {"depth": depth, "width": width, "flops": flops, "length": length, "batch": batch}
            cases[_label(flops, width)] = settings | ({"narrower": narrow} if narrow else {})

    def best_widths(cells: Cells) -> Cells:
        return {
            _best(flops): {"best_width": min(widths, key=lambda width: cells[_label(flops, width)]["loss"])}
            for flops in budgets
        }

    def grow(cells: Cells) -> bool:
        best = [cells[_best(flops)]["best_width"] for flops in budgets]
        return best == sorted(best) and best[-1] > best[0]

    def at_most(cells: Cells, width: int) -> Numbers:
        return cells[_label(budgets[-1], width)]

    def lost(cells: Cells, width: int) -> float:
        return at_most(cells, width)["halved_loss"] - at_most(cells, width)["loss"]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "parameters": MeasuredQuantity("all parameters"),
            "steps": MeasuredQuantity("steps of training"),
            "loss": MeasuredQuantity("held-out loss at the end, nats per byte"),
            "halved_loss": MeasuredQuantity(
                "held-out loss with the smaller half of the block weights set to zero, nats per byte"
            ),
            "cut_loss": MeasuredQuantity(
                "held-out loss when pruned to the block weights of the next narrower model, nats per byte"
            ),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
            "best_width": MeasuredQuantity("width of lowest loss at this budget"),
        },
        seeds=seeds,
        derive=best_widths,
        expect={
            "the best width grows with the budget": grow,
            "at the largest budget, each wider model loses less when half of its block weights are pruned": lambda c: (
                all(lost(c, wide) < lost(c, narrow) for narrow, wide in pairwise(widths))
            ),
            (
                "at the largest budget, a model pruned to the next narrower size beats that model (the paper's claim)"
            ): lambda c: all(
                at_most(c, wide)["cut_loss"] < at_most(c, narrow)["loss"] for narrow, wide in pairwise(widths)
            ),
        },
        plots=[
            StudyPlot("loss", "Held-out loss by compute", x="flops", y="loss", by="width", log_x=True),
            StudyPlot("seconds", "Held-out loss by seconds of training", x="seconds", y="loss", by="width", log_x=True),
            StudyPlot(
                "halved", "Held-out loss with half the weights", x="width", y="halved_loss", by="flops", log_x=True
            ),
        ],
        minutes=12,
    )


def _label(flops: float, width: int) -> str:
    return f"{flops:.1e} FLOP, width {width}"


def _best(flops: float) -> str:
    return f"best at {flops:.1e} FLOP"
