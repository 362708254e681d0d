"""Checks of the effective batch: the examples of each step, and the gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.observed_runs import (
    DRAWING,
    RANDOM,
    CheckSubject,
    farthest,
    gradients_of,
    is_equal,
    relative,
    without_dropout,
)
from thrifty.composition.compose import Run
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batch_norms import normalized_apart
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.randomness import start_draws
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Numerics, Technique

GRADIENTS = range(Stage.MEASURE, Stage.CLIP)
"""Stages that change how a gradient is computed."""
SUMMED = 1e-3
"""Allowed relative difference between gradients that are summed in different orders."""
SUMMED_IN_16_BITS = 0.1
SPREAD = 32.0
WEIGHTS = 1e-4
"""Maximum difference from 1 of the summed weights of an effective batch."""


def data_order(subject: CheckSubject) -> PromiseVerdict:
    """Check that the batch of a step depends on the step alone. Otherwise, a resumed run reads different data."""
    promise = "data by step"
    first, again = (subject.composed(subject.alone).source for _ in range(2))
    steps = range(subject.steps)
    wanted = [first.at(step) for step in steps]
    for step in reversed(steps):  # reverse order, also for a source without earlier reads
        for source, when in ((again, "read first"), (first, "read again")):
            if not _same(source.at(step), wanted[step]):
                text = f"step {step + 1} has different examples when {when}, out of order"
                fix = _blame("batches", subject, "make each step's batch a function of the step alone")
                return broken(promise, "data", text, fix)
    for step, batch in zip(steps, wanted, strict=True):
        total, size = float(batch.weight.sum()), first.size(step)
        if len(batch) != size or abs(total - 1) > WEIGHTS:
            measured = f"step {step + 1} has {len(batch)} examples of total weight {total:.5g}, not {size} of weight 1"
            return broken(promise, "data", measured, _blame("batches", subject, "make weights sum to 1 over a batch"))
    return holds(promise, "data", f"{len(steps)} batches, the same in any order; the weights of each sum to 1")


def accumulation(subject: CheckSubject, run: Run, state: TrainState) -> PromiseVerdict:
    """Check that a step's gradient equals the gradient of the whole effective batch in one pass. The examples have
    unequal weights.
    """
    promise, model = "one big batch", _model(state)
    if subject.batch_norms and _is_at_once(run):
        return not_applicable(promise, "gradients", normalized_apart(subject.batch_norms))
    batch, allowed = unequal(run.source, subject), _allowed(run)
    with _deterministic(model, run, batch) as is_random:
        if is_random:
            return not_applicable(promise, "gradients", RANDOM)
        wanted = _gradient(_at_once(run).backward, model, run.objective, batch)
        if _is_at_once(run):
            if run.objective.joint:
                return not_applicable(promise, "gradients", "examples are compared with each other, in one batch")
            checked, about = _in_parts(run), "two parts of unequal size"
        else:
            checked, about = _settled(run), "the step"
        actual = _gradient(checked.backward, model, run.objective, batch)
    text = f"{about}, with unequal weights: {_distance(actual, wanted)}; {allowed:g} allowed"
    if _is_near(actual, wanted, allowed):
        return holds(promise, "gradients", text)
    if subject.batch_norms:
        fix = _blame("backward", subject, "use norms of single examples, such as GroupNorm and LayerNorm")
        return broken(promise, "gradients", f"{text}; {normalized_apart(subject.batch_norms)}", fix)
    if _is_at_once(run):
        fix = "make the loss of an example depend on this example only; or never divide the batch"
    else:
        fix = _blame("backward", subject, "sum weighted losses instead of averaging means of micro-batches")
    return broken(promise, "gradients", text, fix)


def out_of_memory(subject: CheckSubject, run: Run, state: TrainState) -> PromiseVerdict:
    """Check that a run keeps its effective batch if it reacts to out-of-memory errors with smaller micro-batches. The
    step with the error and the next step are checked.
    """
    promise, model = "batch when memory is short", _model(state)
    if subject.batch_norms:
        return not_applicable(promise, "gradients", normalized_apart(subject.batch_norms))
    unhandled = not_applicable(
        promise, "gradients", "no technique handles out-of-memory errors: the run would end with an error"
    )
    batch = unequal(run.source, subject)
    if _is_at_once(run):
        return unhandled
    with _deterministic(model, run, batch) as is_random:
        if is_random:
            return not_applicable(promise, "gradients", RANDOM)
        at_once, backward, seen = _at_once(run).backward, _settled(run).backward, MemoryLimitedObjective(run.objective)
        wanted = [_gradient(at_once, model, run.objective, batch) for _ in range(2)]
        _gradient(_settled(run).backward, model, seen, batch)
        try:
            short = _gradient(backward, model, MemoryLimitedObjective(run.objective, seen.largest // 2), batch)
        except torch.OutOfMemoryError:
            gradients_of(model)  # clear the partial sums
            return unhandled
        after = _gradient(backward, model, run.objective, batch)
    for actual, should, when in ((short, wanted[0], "when memory is short"), (after, wanted[1], "in the next step")):
        if not _is_near(actual, should, _allowed(run)):
            text = f"{when} the gradient differs from that of the {len(batch)} examples: {_distance(actual, should)}"
            fix = _blame("backward", subject, "repeat all rows in smaller micro-batches")
            return broken(promise, "gradients", text, fix)
    return holds(promise, "gradients", f"all {len(batch)} examples count when memory is short, and in the next step")


class MemoryLimitedObjective(WrappedObjective):
    """Wrapper of an objective that raises OutOfMemoryError for more than `limit` examples in one call."""

    def __init__(self, inner: Objective, limit: int | None = None):
        super().__init__(inner)
        self.limit, self.largest = limit, 0

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if self.limit is not None and len(batch) > self.limit:
            raise torch.OutOfMemoryError(f"this check allows {self.limit} examples at a time")
        self.largest = max(self.largest, len(batch))
        return super().predict(model, batch)


def unequal(source: BatchSource, subject: CheckSubject) -> Batch:
    """Return the first batch with growing weights, like weights from unequal token counts. The last weight is `SPREAD`
    times the first.
    """
    batch = source.at(0).to(subject.device)
    weights = batch.weight * torch.logspace(0, 1, len(batch), base=SPREAD, device=batch.weight.device)
    return batch.weighted(weights / weights.sum())


LossAndGradients = tuple[float, dict[str, Tensor]]
"""A loss and the gradient of each parameter."""


def _settled(run: Run) -> Run:
    """Return the run with fresh state, and without techniques that sample examples or gradient values."""
    return _of(run, lambda one: one.stage not in DRAWING)


def _at_once(run: Run) -> Run:
    """Return the run of `_settled` with only the techniques that change the function or its precision. None of these
    techniques splits a batch."""
    return _of(run, lambda one: one.stage not in (*DRAWING, *GRADIENTS) and one.numerics is Numerics.DIFFERENT)


def _of(run: Run, predicate: Callable[[Technique], bool]) -> Run:
    return replace(run, techniques=tuple(one for one in run.techniques if predicate(one)), notes={})


def _is_at_once(run: Run) -> bool:
    """Return True if no technique divides the batch: all that override `backward` change the function or its precision,
    or override it only as an addition to their change of the model."""
    overriding = [
        one for one in _settled(run).techniques if one.overrides("backward") and "backward" not in one.optional_seams
    ]
    return all(one in _at_once(run).techniques for one in overriding)


def _model(state: TrainState) -> nn.Module:
    assert state.model is not None
    return state.model


@contextmanager
def _deterministic(model: nn.Module, run: Run, batch: Batch) -> Iterator[bool]:
    """Disable dropout inside the context if the model's loss depends on random numbers. Yield True if the loss depends
    on random numbers without dropout too.
    """

    def is_random() -> bool:
        losses = [_gradient(_at_once(run).backward, model, run.objective, batch, seed)[0] for seed in range(2)]
        return losses[0] != losses[1]

    if not is_random():
        yield False
        return
    with without_dropout(model):
        yield is_random()


def _gradient(
    backward: Backward, model: nn.Module, objective: Objective, batch: Batch, seed: int = 0
) -> LossAndGradients:
    """Return the loss and the gradients of a batch, with random numbers that depend on the seed only."""
    gradients_of(model)
    start_draws(seed, batch.weight.device)
    return float(backward(model, objective, batch).loss), gradients_of(model)


class _UnequalParts(Technique):
    """Technique that splits the effective batch into its first third and the rest, as micro-batches."""

    stage, numerics, tolerance = Stage.ACCUMULATE, Numerics.ROUNDING, SUMMED

    def backward(self, backward: Backward) -> Backward:
        def in_parts(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
            cut = max(1, len(batch) // 3)
            first = backward(model, objective, replace(batch.rows(0, cut), last=False))
            return first + backward(model, objective, replace(batch.rows(cut, len(batch)), last=batch.last))

        return in_parts


def _in_parts(run: Run) -> Run:
    together = (*_at_once(run).techniques, _UnequalParts())
    return replace(run, techniques=tuple(sorted(together, key=lambda one: one.stage)), notes={})


def _allowed(run: Run) -> float:
    return SUMMED_IN_16_BITS if any(one.is_low_precision for one in run.techniques) else SUMMED


def _is_near(actual: LossAndGradients, wanted: LossAndGradients, allowed: float) -> bool:
    return farthest(actual[1], wanted[1])[0] <= allowed and relative(actual[0], wanted[0]) <= allowed


def _distance(actual: LossAndGradients, wanted: LossAndGradients) -> str:
    gradient, whose = farthest(actual[1], wanted[1])
    clause = f", that of {whose}" if whose else ""
    return f"{gradient:.1e} of a gradient{clause}, {relative(actual[0], wanted[0]):.1e} of the loss"


def _same(one: Batch, other: Batch) -> bool:
    return (
        one.fields.keys() == other.fields.keys()
        and is_equal(one.weight, other.weight)
        and all(is_equal(tensor, other[name]) for name, tensor in one.fields.items())
    )


def _blame(seam: str, subject: CheckSubject, otherwise: str) -> str:
    names = [one.name for one in subject.alone if one.overrides(seam)]
    return f"{' or '.join(f'--without {name}' for name in names)}; or {otherwise}" if names else otherwise
