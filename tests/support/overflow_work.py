"""Gradients that overflow on request, in one process or on ranks."""

from typing import Any

import torch
from parallel_work import digests
from tiny_runs import advance, losses, plain_run, snapshot, technique, with_optimizer
from torch import nn

from thrifty.composition.compose import compose
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.objective import Objective
from thrifty.core.ranks import rank
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.training.loop import PATIENCE


class Overflows:
    def __init__(self, inner: Backward, settings: "Overflowing"):
        self.inner, self.settings = inner, settings
        self.state = {"calls": torch.tensor(0)}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome = self.inner(model, objective, batch)
        if int(self.state["calls"]) in self.settings.at and rank() == 0:
            (gradient,) = local_tensors([next(model.parameters()).grad])
            gradient.view(-1)[-1] = self.settings.value
        self.state["calls"].add_(1)
        return outcome


class Overflowing(Technique):
    """Make one gradient element overflow, on the first rank only, in these passes over a micro-batch."""

    stage, numerics = Stage.CLIP, Numerics.DIFFERENT

    at: tuple[int, ...] = ()
    value: float = float("nan")

    def backward(self, backward: Backward) -> Backward:
        return Overflows(backward, self)


def float16(**settings: Any) -> Technique:
    """Return float16 precision with a scale so low that a tiny run does not overflow by itself."""
    return technique("precision.mixed", **{"format": "float16", "init_scale": 2.0**10, **settings})


def train_with_overflows(strategy: str) -> dict[str, Any]:
    """Run a few steps on this rank; the second of two micro-batches overflows in the third step."""
    others = [technique(name) for name in (strategy, "large_batch.gradient_accumulation")]
    run = compose(plain_run(), with_optimizer([*others, float16(), Overflowing(at=(5,))]), 6)
    state = run.start()
    records = advance(run, state)
    assert state.optimizer is not None
    always = Overflowing(at=tuple(range(2 * (PATIENCE + 1))))
    run = compose(plain_run(), with_optimizer([*others, float16(init_scale=2.0**20), always]), PATIENCE + 1)
    return {
        "answered": len(advance(run, run.start())),
        "losses": losses(records),
        "skipped": [record.step for record in records if record.skipped],
        "scales": [record.notes["loss_scale"] for record in records],
        "updates": state.optimizer.updates,
        "tensors": digests(snapshot(state).tensors),
    }
