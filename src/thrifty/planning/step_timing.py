"""Timing of training steps in the process of a probe."""

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from thrifty.composition.compose import Run
from thrifty.core.backward import Backward
from thrifty.core.batches import Batch, any_examples
from thrifty.core.errors import ThriftyError
from thrifty.core.state import TrainState
from thrifty.machine.cpu_contention import CpuContention
from thrifty.optim.transform_elements import global_norm
from thrifty.planning.cost_estimates import StepTiming, count_footprint
from thrifty.training import checkpoint
from thrifty.training.evaluation import evaluate
from thrifty.training.memory_meter import MemoryMeter
from thrifty.training.rank_sync import process_group_sync

LEAST, MOST = 3, 12
"""Minimum and maximum number of timed steps per size, after one warm-up step. Timing ends when steps agree."""
AGREE, SECONDS = 1.03, 2.0
"""Maximum ratio of median to minimum step time for agreement, and minimum seconds of all steps. The minimum exists
because machine speed varies over seconds."""
JUDGED = 2
"""Number of batches for the estimated time of an evaluation, after a first batch that may compile."""


def time_steps(
    run: Run, rows: Sequence[int], parts: int, held_out: Sequence[Batch], seconds: float, bar: float = math.inf
) -> StepTiming:
    """Time training steps for each micro-batch size in `rows`, for about `seconds` in total. Then time an evaluation
    and a checkpoint.

    The largest size is first. If its step is slower than `bar` seconds, smaller sizes are skipped. All ranks must call
    this function. Each rank returns its own times, and the maximum bytes over ranks.

    `run` must not have techniques for micro-batches. With several `parts`, a step of the largest size runs two
    micro-batches, so that gradients and activations are in memory at the same time.
    """
    count_footprint(run)  # import modules first, as a run does, so that they do not count as its memory
    meter, began = MemoryMeter(run.device), time.perf_counter()
    state = run.init_state()
    passes: dict[int, list[float]] = {}
    updates: list[float] = []
    spreads: list[float] = []
    largest, startup, others, all_ranks = max(rows), 0.0, None, process_group_sync()
    for size in sorted(rows, reverse=True):
        cut = 2 if parts > 1 and size == largest else 1
        _step(run, state, size, cut, 0)
        startup = startup or time.perf_counter() - began
        others = others or CpuContention()
        passes[size], update = _repeated(run, state, size, cut, seconds / len(rows))
        updates += update
        spreads.append(_spread([a + b for a, b in zip(passes[size], update, strict=True)]))
        step = run.source.batch / size * min(passes[size]) + min(update)
        if all_ranks.run_first(lambda step=step: step > bar):
            break
    assert others is not None
    memory, used_by_others = meter.peak(), others.taken()
    first, evaluation = _timed_evaluation(run, state, held_out)
    sizes = sorted(passes)
    return StepTiming(
        rows=tuple(sizes),
        passes=tuple(statistics.median(passes[size]) for size in sizes),
        least=tuple(min(passes[size]) for size in sizes),
        update=statistics.median(updates),
        spread=max(spreads),
        startup=startup + first,
        evaluation=evaluation,
        save=_timed_save(state),
        memory=max(all_ranks.gather_or_raise(lambda: max(memory, meter.peak()))),
        others=used_by_others if run.device.type == "cpu" else 0.0,
        cores=len(others.cores),
        process=max(all_ranks.gather_or_raise(lambda: meter.process)),
    )


def _repeated(run: Run, state: TrainState, rows: int, cut: int, seconds: float) -> tuple[list[float], list[float]]:
    """Return the seconds per micro-batch and the seconds of the update, for each of several steps."""
    backward: list[float] = []
    update: list[float] = []
    began, all_ranks = time.perf_counter(), process_group_sync()

    while len(backward) < LEAST or not all_ranks.run_first(lambda: _is_enough(backward, began, seconds)):
        one, other = _step(run, state, rows, cut, 1 + len(backward))
        backward.append(one / cut)
        update.append(other)
    return backward, update


def _is_enough(passes: Sequence[float], began: float, seconds: float) -> bool:
    elapsed = time.perf_counter() - began
    settled = len(passes) >= MOST or statistics.median(passes) <= AGREE * min(passes)
    return elapsed > seconds or (elapsed > SECONDS and settled)


def _step(run: Run, state: TrainState, rows: int, cut: int, number: int) -> tuple[float, float]:
    """Run a step like the training loop. Return the seconds of its passes and of its update."""
    model, optimizer = state.model, state.optimizer
    assert model is not None and optimizer is not None
    model.train()
    with any_examples():
        batch = run.source.at(max(run.steps - 1 - number, 0))
    backward: Backward = run.backward
    start = time.perf_counter()
    for _ in range(cut):
        outcome = backward(model, run.objective, batch.rows(0, rows).to(run.device))
    outcome.loss.item()
    half = time.perf_counter()
    norm = global_norm([parameter.grad for parameter in optimizer.parameters if parameter.grad is not None])
    if torch.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    if run.device.type in ("cuda", "mps"):
        torch.accelerator.synchronize(run.device)
    return half - start, time.perf_counter() - half


def _spread(seconds: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / 2 / middle


def _timed_evaluation(run: Run, state: TrainState, held_out: Sequence[Batch]) -> tuple[float, float]:
    """Return the seconds of the first batch with compilation, and the estimated seconds of all batches."""

    def judged(batches: Sequence[Batch]) -> float:
        assert state.model is not None
        start = time.perf_counter()
        evaluate(state.model, run.eval_objective, batches, run.device)
        return time.perf_counter() - start

    first, few = judged(held_out[:1]), held_out[1 : 1 + JUDGED] or held_out[:1]
    return first, judged(few) / len(few) * len(held_out)


def _timed_save(state: TrainState) -> float:
    """Return the seconds of a checkpoint on the disk for temporary files, or 0 if the disk is full."""
    all_ranks = process_group_sync()
    folder = Path(all_ranks.run_first(tempfile.mkdtemp))
    try:
        return checkpoint.save(folder, 0, state.tensors(), {**state.scalars(), "steps": 0}, ranks=all_ranks).seconds
    except (OSError, ThriftyError):
        return 0.0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
