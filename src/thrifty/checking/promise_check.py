"""Test of a combination of techniques on the user's model and data (`thrifty check`).

The check trains a few steps with a small batch:

    from thrifty.checking.promise_check import check
    checked = check(recipe)
    assert not checked.broken, checked.broken
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from thrifty.checking import label_check
from thrifty.checking.batch_checks import accumulation, data_order, out_of_memory
from thrifty.checking.check_verdicts import CheckReport, PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.exactness_check import exactness
from thrifty.checking.export_check import export_round_trip
from thrifty.checking.gradient_flow_check import ZeroWeightWatcher, gradient_flow
from thrifty.checking.observed_runs import CheckSubject, one_line_error, train_observed
from thrifty.checking.rank_check import PROMISE, Start, across_ranks, smaller_mesh
from thrifty.checking.resume_check import StateSaver, check_resume
from thrifty.composition.compose import BaseRun, Run
from thrifty.composition.fake_runs import trained_batch_norms
from thrifty.core.batches import Batch, BatchSource, WrappedSource
from thrifty.core.errors import IntegrityError, UsageError, spelled
from thrifty.core.recipe import Recipe
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.training.determinism import deterministic_kernels, missing_deterministic_kernel
from thrifty.training.run_setup import PreparedRun, prepare_run

STEPS, EXAMPLES = 4, 4
LEAST = 3
"""Minimum number of steps. Some parameters have a gradient only after some steps. For example, the gradient of LoRA's A
is zero until B has changed.
"""
NOT_FINITE = (
    "lower the learning rate; or --with gradients.clip; or, if it is step 1, remove the cause in the data, the initial "
    "values or the loss"
)

Say = Callable[[str], None]


def check(
    recipe: Recipe,
    *,
    steps: int = STEPS,
    examples: int = EXAMPLES,
    length: int | None = None,
    ranks: bool = True,
    start: Start | None = None,
    say: Say = lambda text: None,
) -> CheckReport:
    """Check a recipe at reduced size.

    `steps` is the number of steps. `examples` limits the effective batch, which is larger if the techniques require
    more examples. `length` limits the tokens of an example. If `ranks` is False, no rank processes start. `start`
    replaces the function that starts rank processes. `say` receives the name of each check. Raises UsageError if the
    recipe cannot be trained.
    """
    if steps < LEAST:
        raise UsageError(f"a check of '{steps}' steps is too short, it requires {LEAST}", fix=f"--steps {LEAST}")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError("a check starts its ranks itself, from one process", fix="start the check without torchrun")
    began = time.monotonic()
    small, prepared, cuts = _made_smaller(recipe, steps, examples, length)
    alone = replace(small, techniques=_alone(small.techniques))

    def reopened() -> BaseRun:
        return prepare_run(alone, steps, quiet=True).run.plain

    subject = CheckSubject(reopened, small.techniques, steps, small.seed, prepared.run.device)
    verdicts: list[PromiseVerdict] = []
    same = deterministic_kernels(subject.device, small.deterministic)
    with tempfile.TemporaryDirectory(prefix="thrifty-check-") as folder, same:
        here = Path(folder)

        def exported(run: Run, state: TrainState) -> PromiseVerdict:
            return export_round_trip(subject, small, prepared.data.ends, run, state, here / "export")

        objective, batch = prepared.run.plain.objective, prepared.run.source.at(0)
        verdicts.append(label_check.labels(objective, batch))
        verdicts += _of_run(subject, here / "checkpoints", say, exported)
        say("ranks")
        verdicts.append(_of_ranks(subject, small, here, ranks, start))
        preview = label_check.format_example(small, prepared.data, objective, batch)
    return CheckReport(recipe.name, tuple(verdicts), cuts, preview, round(time.monotonic() - began, 1))


def check_run(
    open_plain: Callable[[], BaseRun], techniques: Iterable[Technique], steps: int = STEPS, seed: int = 0
) -> tuple[PromiseVerdict, ...]:
    """Return the verdicts for a plain run that `open_plain` opens anew at each call. Verdicts that require a recipe
    (labels, export, ranks) are omitted.
    """
    subject = CheckSubject(open_plain, tuple(techniques), steps, seed)
    with tempfile.TemporaryDirectory(prefix="thrifty-check-") as folder:
        return tuple(_of_run(subject, Path(folder), lambda text: None))


Finish = Callable[[Run, TrainState], PromiseVerdict]


def _of_run(subject: CheckSubject, folder: Path, say: Say, finish: Finish | None = None) -> Iterator[PromiseVerdict]:
    """Yield the verdicts of a run: first on training, then on each promise. `finish` may modify the trained model."""
    unrepeatable = subject.open().source.unrepeatable
    if unrepeatable:  # the following checks compare runs on the same data
        subject = replace(subject, open=_remembered(subject.open))
    yield not_applicable("data by step", "data", unrepeatable) if unrepeatable else data_order(subject)
    zero_weights, saving = ZeroWeightWatcher(), StateSaver(folder, subject.steps // 2)

    def observe(run: Run, state: TrainState) -> None:
        run.verify(state)
        zero_weights.observe(state)
        saving.observe(state)

    say("training with all techniques")
    try:
        run, trace = train_observed(subject, subject.alone, at=observe)
    except UsageError:
        raise
    except Exception as error:  # any technique may raise anything
        promise = "invariants" if isinstance(error, IntegrityError) else "it trains"
        lacking = missing_deterministic_kernel(error)
        fix = lacking.fix if lacking else _blamed(str(error), subject)
        yield broken(promise, "run", one_line_error(lacking or error), fix)
        return
    if trace.not_finite:  # values of later steps and of other runs mean nothing
        yield broken("it trains", "run", trace.not_finite, NOT_FINITE)
        return
    promising = [one.name for one in subject.alone if type(one).holds is not Technique.holds]
    text = f"checked at each of {subject.steps} steps by {', '.join(promising)}" if promising else ""
    yield (
        holds("invariants", "run", text)
        if promising
        else not_applicable("invariants", "run", "no technique has invariants")
    )
    yield from zero_weights.verdict(trace.state)
    yield gradient_flow(subject, trace)
    say("saved and resumed")
    yield not_applicable("resume", "checkpoint", unrepeatable) if unrepeatable else check_resume(subject, trace, saving)
    say("with and without each technique that promises the same values")
    yield from exactness(subject, trace)
    for check_gradients, promise in ((accumulation, "one big batch"), (out_of_memory, "batch when memory is short")):
        try:
            yield check_gradients(subject, run, trace.state)
        except Exception as error:  # caused by conditions of the check alone, such as disabled dropout
            yield not_applicable(promise, "gradients", f"it cannot be measured: {one_line_error(error)}")
    if finish:
        say("exported and loaded")
        yield finish(run, trace.state)


class _RememberedSource(WrappedSource):
    """Wrapper of a source that reads each effective batch once and keeps it."""

    def __init__(self, source: BatchSource):
        self.source, self.batch = source, source.batch
        self.read: dict[int, Batch] = {}

    def rows(self, step: int, start: int, stop: int) -> Batch:
        if step not in self.read:
            self.read[step] = self.source.at(step)
        return self.read[step].rows(start, stop)


def _remembered(open_plain: Callable[[], BaseRun]) -> Callable[[], BaseRun]:
    source = _RememberedSource(open_plain().source)
    return lambda: replace(open_plain(), source=source)


def _blamed(text: str, subject: CheckSubject) -> str:
    names = [one.name for one in subject.alone if one.name in text]
    return f"--without {names[0]}" if names else "remove techniques one at a time: --without NAME"


def _of_ranks(subject: CheckSubject, recipe: Recipe, folder: Path, wanted: bool, start: Start | None) -> PromiseVerdict:
    if not wanted:
        return not_applicable(PROMISE, "ranks", f"left out by {spelled('--no-ranks', 'ranks=False')}")
    return across_ranks(subject, recipe, folder, start)


def _alone(techniques: Iterable[Technique]) -> tuple[Technique, ...]:
    return tuple(technique for technique in techniques if not technique.divides_ranks)


def _made_smaller(
    recipe: Recipe, steps: int, examples: int, length: int | None
) -> tuple[Recipe, PreparedRun, tuple[str, ...]]:
    """Return the recipe with a smaller batch, and texts that describe the reductions. The batch is the smallest of at
    least `examples` that the recipe's techniques accept."""
    data = recipe.data
    if length is not None and length < data.length:
        data = replace(data, length=length)
    _, count = smaller_mesh(recipe)
    size = min(-(-examples // count) * count, data.batch)  # the same number for each rank
    parts = max((one.micro_batches for one in recipe.techniques), default=1)
    least = min(2 * count * parts, data.batch)  # the variance of one example is undefined
    while True:
        small = replace(recipe, data=replace(data, batch=size))
        try:
            prepared = prepare_run(replace(small, techniques=_alone(small.techniques)), steps, quiet=True)
            _ = prepared.run.source.at(0)
            if size >= least or not trained_batch_norms(prepared.run.plain):
                break
            size = least
        except UsageError:
            if size == recipe.data.batch:
                raise
            size = min(2 * size, recipe.data.batch)
    cuts = [f"{steps} steps"]
    if size < recipe.data.batch:
        cuts.append(f"an effective batch of {size} examples, not {recipe.data.batch}")
    if data.length < recipe.data.length:
        cuts.append(f"examples of {data.length} tokens, not {recipe.data.length}")
    return small, prepared, tuple(cuts)
