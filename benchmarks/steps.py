"""Whole training steps of composed runs, for interleaved benchmarks."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from thrifty.composition.compose import Run
from thrifty.core.batches import Batch, BatchSource


class SameRows(BatchSource):
    """Data source with the same examples at every step: fields of b rows each."""

    def __init__(self, fields: Mapping[str, Tensor]):
        self.batch = len(next(iter(fields.values())))
        self.only = Batch({**fields, "key": torch.arange(self.batch)}, torch.full((self.batch,), 1 / self.batch))

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.only.rows(start, stop)


def whole_step(run: Run) -> Callable[[], None]:
    """Return a function that runs forward, backward and update on the run's first batch."""
    state, batch = run.start(), run.source.at(0).to(run.device)
    model, optimizer = state.model, state.optimizer
    assert model is not None and optimizer is not None
    model.train()

    def step() -> None:
        run.backward(model, run.objective, batch)
        optimizer.step()
        optimizer.zero_grad()

    return step
