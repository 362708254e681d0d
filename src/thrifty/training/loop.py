"""The training loop: a generator of records.

    due structure changes → batch of the step → gradients → update → record

Everything else (evaluate, save, display, stop) is ordinary code that reads the records. That code may modify the state
between two records. At a yield the state is exactly the content of a checkpoint.
"""

import math
import time
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import nn

from thrifty.composition.compose import Run
from thrifty.composition.index_check import explain_missing_rows
from thrifty.core.errors import ThriftyError
from thrifty.core.mesh import axis
from thrifty.core.randomness import seed_of, start_draws
from thrifty.core.ranks import random_stream
from thrifty.core.state import StructureLogEntry, TrainState
from thrifty.core.written_buffers import BufferSnapshot
from thrifty.data.prefetch import prefetch
from thrifty.optim.transform_elements import global_norm

PATIENCE = 10
"""Consecutive steps without a finite gradient after which a run stops."""


@dataclass(frozen=True)
class Record:
    """The record of one step. `step` is the number of finished steps."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    """Number of tokens (or other examples) processed in this step over all ranks."""
    seconds: float
    """Duration of the step, including the wait for its batch."""
    skipped: bool = False
    notes: dict[str, float] = field(default_factory=dict)
    changes: tuple[StructureLogEntry, ...] = ()
    held_out_loss: float | None = None
    """Loss on the held-out data if the run was evaluated after this step, else None."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation after this step."""
    state: TrainState = field(default_factory=TrainState, repr=False, compare=False)
    """The state in training; between two records it equals the content of a checkpoint."""

    @property
    def model(self) -> nn.Module:
        """The model in training. It may be evaluated between steps; the next step sets training mode again."""
        assert self.state.model is not None
        return self.state.model


def step_seed(seed: int, step: int, draws: int) -> int:
    """Return the seed of the random numbers inside a step. The seed depends only on these three arguments."""
    return seed_of(f"{seed}/{step}/{draws}")


def train(run: Run, state: TrainState, seed: int) -> Generator[Record, None, None]:
    """Train from the state's step to the end of the run and yield one record per step; `state` is updated in place.

    A step whose loss or gradient is not finite changes no parameters, buffers, optimizer state or schedule. Raise
    ThriftyError after `PATIENCE` consecutive such steps that no technique handles. Raise IntegrityError if a
    technique's promise is broken.
    """
    run.verify(state)
    skipped, began = 0, time.perf_counter()
    for batch in prefetch(run.source, state.step, run.steps):
        changes = run.changes(state)
        if changes:
            run.verify(state)
        model, optimizer = state.model, state.optimizer
        assert model is not None and optimizer is not None
        model.train()
        start_draws(step_seed(seed, state.step, random_stream()), run.device)
        buffers = BufferSnapshot(model)
        with explain_missing_rows(run.plain, [batch]):
            outcome = run.backward(model, run.objective, batch.to(run.device))
        buffers.forget_constant()
        norm = global_norm([parameter.grad for parameter in optimizer.parameters if parameter.grad is not None])
        # one transfer for both values; they are equal on every rank, so all ranks make the same decision
        loss, gradient_norm = torch.stack([outcome.loss.float(), norm.float()]).tolist()
        learning_rate = optimizer.learning_rate()
        finite = math.isfinite(loss) and math.isfinite(gradient_norm)
        moved = finite and optimizer.will_move_masks()
        if finite:
            optimizer.step()
        else:
            buffers.put_back()
        optimizer.zero_grad()
        state.step += 1
        if moved:
            run.verify(state)
        if not outcome.overflow_handled:
            skipped = 0 if finite else skipped + 1
        tokens = run.objective.tokens(batch) * axis("data").size
        _count(state, tokens=tokens, skipped=int(not finite), seconds=time.perf_counter() - began)
        yield Record(
            step=state.step,
            loss=loss,
            learning_rate=learning_rate,
            gradient_norm=gradient_norm,
            tokens=tokens,
            seconds=time.perf_counter() - began,
            skipped=not finite,
            notes=outcome.notes,
            changes=tuple(changes),
            state=state,
        )
        if skipped >= PATIENCE:
            raise ThriftyError(
                f"the loss or the gradient was not finite in {skipped} steps in a row, up to step {state.step}: "
                f"the last loss was {loss}, the last gradient norm {gradient_norm}",
                fix="lower the learning rate; or --with gradients.clip; these steps have not changed the parameters",
            )
        began = time.perf_counter()  # time that the caller spends on the record is not part of a step
    run.verify(state)


def _count(state: TrainState, **amounts: float) -> None:
    for name, amount in amounts.items():
        state.counters[name] = state.counters.get(name, 0) + amount
