"""Whether the effective batch is what the recipe says: where it comes from, and what is done with it in a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.observed_runs import DRAWING, CheckSubject, farthest, gradients_of, relative, without_dropout
from thrifty.composition.compose import Run
from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batch_norms import normalized_apart
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.objective import Objective, Prediction, WrappedObjective
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.technique import Numerics, Technique

GRADIENTS = range(Stage.MEASURE, Stage.CLIP)
"""Stages that say how a gradient is obtained."""
SUMMED = 1e-3
"""How far the order of summation may move a gradient, as a share of itself."""
SUMMED_IN_16_BITS = 0.1
SPREAD = 32.0
WEIGHTS = 1e-4
"""How far from 1 the weights of an effective batch may sum up to."""


def data_order(subject: CheckSubject) -> PromiseVerdict:
    """Whether the batch of a step depends on nothing but the step: only then is a resumed run given what it would have
    been given."""
    promise = "data by step"
    first, again = (subject.composed(subject.alone).source for _ in range(2))
    steps = range(subject.steps)
    wanted = [first.at(step) for step in steps]
    for step in reversed(steps):  # another order, in a source that has not been asked before
        for source, how in ((again, "asked first"), (first, "asked again")):
            if not _same(source.at(step), wanted[step]):
                text = f"step {step + 1} is given other examples when {how}, out of order"
                fix = _blame("batches", subject, "give each step's batch as a function of the step alone")
                return broken(promise, "data", text, fix)
    for step, batch in zip(steps, wanted, strict=True):
        total, size = float(batch.weight.sum()), first.size(step)
        if len(batch) != size or abs(total - 1) > WEIGHTS:
            measured = f"step {step + 1} has {len(batch)} examples of weight {total:.5g} in all, not {size} of weight 1"
            return broken(promise, "data", measured, _blame("batches", subject, "let weights sum to 1 over a batch"))
    return holds(promise, "data", f"{len(steps)} batches, the same in any order; the weights of each sum to 1")


def accumulation(subject: CheckSubject, run: Run, state: TrainState) -> PromiseVerdict:
    """Whether a step's gradient is that of the whole effective batch at once, examples weighing differently."""
    promise, model = "one big batch", _model(state)
    if subject.batch_norms and _is_at_once(run):
        return not_applicable(promise, "gradients", normalized_apart(subject.batch_norms))
    batch, allowed = unequal(run.source, subject), _allowed(run)
    with _held_still(model, run, batch):
        wanted = _gradient(_at_once(run).backward, model, run.objective, batch)
        if _is_at_once(run):
            if run.objective.joint:
                return not_applicable(promise, "gradients", "examples are compared with each other, in one batch")
            taken, about = _in_parts(run), "two parts of unequal size"
        else:
            taken, about = _settled(run), "the step"
        actual = _gradient(taken.backward, model, run.objective, batch)
    text = f"{about}, weights unequal: {_distance(actual, wanted)}; {allowed:g} allowed"
    if _is_near(actual, wanted, allowed):
        return holds(promise, "gradients", text)
    if subject.batch_norms:
        fix = _blame("backward", subject, "norms of each example, such as GroupNorm and LayerNorm")
        return broken(promise, "gradients", f"{text}; {normalized_apart(subject.batch_norms)}", fix)
    fix = _blame("backward", subject, "sum weighted losses, never average means of micro-batches")
    return broken(promise, "gradients", text, fix)


def out_of_memory(subject: CheckSubject, run: Run, state: TrainState) -> PromiseVerdict:
    """Whether a run that answers a lack of memory by smaller micro-batches still trains on its effective batch, in that
    step and in the next."""
    promise, model = "batch when memory is short", _model(state)
    if subject.batch_norms:
        return not_applicable(promise, "gradients", normalized_apart(subject.batch_norms))
    nobody = not_applicable(promise, "gradients", "no technique answers it: the run would end with an error")
    batch = unequal(run.source, subject)
    if _is_at_once(run):
        return nobody
    with _held_still(model, run, batch):
        at_once, backward, seen = _at_once(run).backward, _settled(run).backward, MemoryLimitedObjective(run.objective)
        wanted = [_gradient(at_once, model, run.objective, batch) for _ in range(2)]
        _gradient(_settled(run).backward, model, seen, batch)
        try:
            short = _gradient(backward, model, MemoryLimitedObjective(run.objective, seen.largest // 2), batch)
        except torch.OutOfMemoryError:
            gradients_of(model)  # what was summed until then
            return nobody
        after = _gradient(backward, model, run.objective, batch)
    for actual, should, when in ((short, wanted[0], "when memory is short"), (after, wanted[1], "in the step after")):
        if not _is_near(actual, should, _allowed(run)):
            text = f"{when} the gradient is not that of the {len(batch)} examples: {_distance(actual, should)}"
            fix = _blame("backward", subject, "go through all rows again in smaller micro-batches")
            return broken(promise, "gradients", text, fix)
    return holds(promise, "gradients", f"all {len(batch)} examples count when memory is short, and after that")


class MemoryLimitedObjective(WrappedObjective):
    """Another objective on a device that has memory for so many examples at a time, if `limit` says so."""

    def __init__(self, inner: Objective, limit: int | None = None):
        super().__init__(inner)
        self.limit, self.largest = limit, 0

    def predict(self, model: nn.Module, batch: Batch) -> Prediction:
        if self.limit is not None and len(batch) > self.limit:
            raise torch.OutOfMemoryError(f"a check lets no more than {self.limit} examples in at a time")
        self.largest = max(self.largest, len(batch))
        return super().predict(model, batch)


def unequal(source: BatchSource, subject: CheckSubject) -> Batch:
    """The first batch with examples of growing weight, the last `SPREAD` times that of the first, as if it had so many
    more tokens."""
    batch = source.at(0).to(subject.device)
    weights = batch.weight * torch.logspace(0, 1, len(batch), base=SPREAD, device=batch.weight.device)
    return batch.weighted(weights / weights.sum())


Found = tuple[float, dict[str, Tensor]]
"""A loss and the gradient of each parameter."""


def _settled(run: Run) -> Run:
    """The run without what draws the examples or the values that a gradient is made of; it remembers nothing yet."""
    return _of(run, lambda one: one.stage not in DRAWING)


def _at_once(run: Run) -> Run:
    """Of that, what says which function is learned and in what numbers: nothing that takes a batch apart."""
    return _of(run, lambda one: one.stage not in (*DRAWING, *GRADIENTS) and one.numerics is Numerics.DIFFERENT)


def _of(run: Run, is_kept: Callable[[Technique], bool]) -> Run:
    return replace(run, techniques=tuple(one for one in run.techniques if is_kept(one)), notes={})


def _is_at_once(run: Run) -> bool:
    """Whether nothing of the run touches how gradients are obtained but what belongs to the function."""
    touching = [one for one in _settled(run).techniques if one.overrides("backward")]
    return all(one in _at_once(run).techniques for one in touching)


def _model(state: TrainState) -> nn.Module:
    assert state.model is not None
    return state.model


@contextmanager
def _held_still(model: nn.Module, run: Run, batch: Batch) -> Iterator[None]:
    """The model as it trains, without dropout where there is any."""
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(_gradient(_at_once(run).backward, model, run.objective, batch)[0])
    with nullcontext() if losses[0] == losses[1] else without_dropout(model):
        yield


def _gradient(backward: Backward, model: nn.Module, objective: Objective, batch: Batch) -> Found:
    gradients_of(model)
    return float(backward(model, objective, batch).loss), gradients_of(model)


class _UnequalParts(Technique):
    """The effective batch as its first third and the rest, where micro-batches are made."""

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


def _is_near(actual: Found, wanted: Found, allowed: float) -> bool:
    return farthest(actual[1], wanted[1])[0] <= allowed and relative(actual[0], wanted[0]) <= allowed


def _distance(actual: Found, wanted: Found) -> str:
    gradient, whose = farthest(actual[1], wanted[1])
    clause = f", that of {whose}" if whose else ""
    return f"{gradient:.1e} of a gradient{clause}, {relative(actual[0], wanted[0]):.1e} of the loss"


def _same(one: Batch, other: Batch) -> bool:
    return (
        one.fields.keys() == other.fields.keys()
        and torch.equal(one.weight, other.weight)
        and all(torch.equal(tensor, other[name]) for name, tensor in one.fields.items())
    )


def _blame(seam: str, subject: CheckSubject, otherwise: str) -> str:
    names = [one.name for one in subject.alone if one.overrides(seam)]
    return f"{' or '.join(f'--without {name}' for name in names)}; or {otherwise}" if names else otherwise
