"""Whole steps of a run, timed: what a probe does in its process."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from thrifty.core.backward import Backward
from thrifty.core.batches import Batch
from thrifty.core.compose import Composition
from thrifty.core.elements import global_norm
from thrifty.core.errors import UsageError
from thrifty.core.state import TrainState
from thrifty.planning.predict import Timing, counted
from thrifty.training import checkpoint
from thrifty.training.evaluate import evaluate
from thrifty.training.memory import MemoryMeter

LEAST, MOST = 3, 12
"""Steps timed of each size, after one that is not."""


def timed(run: Composition, rows: Sequence[int], parts: int, held_out: Sequence[Batch], seconds: float) -> Timing:
    """Train steps in micro-batches of each of these sizes, about `seconds` long in all, then evaluate and save once.

    `run` is without what cuts its batches apart; of the last size, two micro-batches make a step if the plan's step has
    several `parts`, so that gradients stand beside activations as they will.
    """
    counted(run)  # as a run does before it measures: what is imported on the way is not among its own bytes
    meter, began = MemoryMeter(run.device), time.perf_counter()
    state = run.place()
    passes: list[float] = []
    least: list[float] = []
    updates: list[float] = []
    spreads: list[float] = []
    startup = 0.0
    for size in rows:
        together = 2 if parts > 1 and size == rows[-1] else 1
        _step(run, state, size, together, 0)
        startup = startup or time.perf_counter() - began
        backward, update = _repeated(run, state, size, together, seconds / len(rows))
        passes.append(statistics.median(backward))
        least.append(min(backward))
        updates += update
        spreads.append(_spread([a + b for a, b in zip(backward, update, strict=True)]))
    memory = meter.peak()
    evaluation = _timed_evaluation(run, state, held_out)
    return Timing(
        rows=tuple(rows),
        passes=tuple(passes),
        least=tuple(least),
        update=statistics.median(updates),
        spread=max(spreads),
        startup=startup,
        evaluation=evaluation,
        save=_timed_save(state),
        memory=max(memory, meter.peak()),
    )


def _repeated(
    run: Composition, state: TrainState, rows: int, together: int, seconds: float
) -> tuple[list[float], list[float]]:
    """Seconds of each micro-batch and of each update, over some steps."""
    backward: list[float] = []
    update: list[float] = []
    began = time.perf_counter()
    while len(backward) < LEAST or (len(backward) < MOST and time.perf_counter() - began < seconds):
        one, other = _step(run, state, rows, together, 1 + len(backward))
        backward.append(one / together)
        update.append(other)
    return backward, update


def _step(run: Composition, state: TrainState, rows: int, together: int, number: int) -> tuple[float, float]:
    """A step as the training loop makes it, and the seconds of its two halves."""
    model, optimizer = state.model, state.optimizer
    assert model is not None and optimizer is not None
    model.train()
    batch = run.source.at(max(run.steps - 1 - number, 0))
    backward: Backward = run.backward
    start = time.perf_counter()
    for _ in range(together):
        outcome = backward(model, run.objective, batch.rows(0, rows).to(run.device))
    outcome.loss.item()
    half = time.perf_counter()
    norm = global_norm([parameter.grad for parameter in optimizer.parameters if parameter.grad is not None])
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return half - start, time.perf_counter() - half


def _spread(seconds: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


def _timed_evaluation(run: Composition, state: TrainState, held_out: Sequence[Batch]) -> float:
    assert state.model is not None
    start = time.perf_counter()
    evaluate(state.model, run.judged_by, held_out, run.device)
    return time.perf_counter() - start


def _timed_save(state: TrainState) -> float:
    """Seconds of a checkpoint, on the disk for temporary files; 0 where there is no room for one."""
    with tempfile.TemporaryDirectory() as folder, suppress(OSError, UsageError):
        return checkpoint.save(Path(folder), 0, state.tensors(), {**state.scalars(), "steps": 0}).seconds
    return 0.0
