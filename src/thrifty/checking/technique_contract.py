"""Contract of a technique: promises that a run, a planner and a recipe rely on, tested for one technique.

Each function of `PROMISES` returns a message that describes the fault, or "". `promise_check.check_run` tests how the
technique affects values, gradients and resuming.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, get_origin

import torch
from torch import Tensor, nn

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.observed_runs import CheckSubject, one_line_error, train_observed
from thrifty.composition.compose import CPU, BaseRun, Run
from thrifty.composition.explain import explain
from thrifty.core.batches import Batch, BatchSource, WrappedSource
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.plain_values import build, to_data
from thrifty.core.stages import HOW, Stage
from thrifty.core.technique import Numerics, Technique

LEARNING_STEPS = 40
FIXES = {
    "settings": "annotate settings with plain types: rank: int = 8",
    "stage and numerics": "stage, numerics = Stage.…, Numerics.…; tolerance > 0 with Numerics.ROUNDING alone",
    "claims": "make claims, micro_batches, number_format and recomputation consistent",
    "seams": "return the argument itself if nothing changes",
    "parameter names": "keep the plain model's parameter names, and only add to them",
    "order of techniques": "make the result of a method depend only on its argument and the settings",
    "export": "in finish, remove all modules that model added; or raise RefusedError with a fix",
    "explanation": "override footprint only for costs that a traced step cannot show",
    "refusal": "raise RefusedError(what, fix) for an unsuitable model",
    "it learns": "print the loss of each step: thrifty.train(…, techniques=[…])",
}


@dataclass(frozen=True)
class ContractSubject:
    """A technique, other techniques that run together with it, and the plain run, opened anew at each call."""

    technique: Technique
    others: tuple[Technique, ...]
    open: Callable[[], BaseRun]
    steps: int = 6
    device: torch.device = CPU

    def composed(self) -> Run:
        return self.trained_as().composed(self.techniques)

    def trained_as(self, steps: int = 0, open_plain: Callable[[], BaseRun] | None = None) -> CheckSubject:
        return CheckSubject(open_plain or self.open, self.techniques, steps or self.steps, device=self.device)

    @property
    def techniques(self) -> tuple[Technique, ...]:
        return (self.technique, *self.others)

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits of one batch, with the model in evaluation mode."""
        plain = self.open()
        with torch.no_grad():
            batch = plain.objective.examples(plain.source.at(9)).to(self.device)
            return plain.objective.predict(model.eval(), batch).logits


def settings(subject: ContractSubject) -> str:
    one, kind = subject.technique, type(subject.technique)
    own = {name for name, hint in vars(kind).get("__annotations__", {}).items() if get_origin(hint) is not ClassVar}
    if missing := sorted(own - {field.name for field in fields(one)}):
        return f"{', '.join(missing)} of {kind.__name__} is not a dataclass field"
    if hash(one) != hash(dataclasses.replace(one)):
        return "two equal values have different hashes"
    for field in fields(one):
        try:
            setattr(one, field.name, getattr(one, field.name))
        except dataclasses.FrozenInstanceError:
            continue
        return f"{field.name} can be assigned after construction"
    if build(kind, to_data(one)) != one:
        return f"its settings do not survive conversion to plain data: {to_data(one)}"
    return ""


def stage_and_numerics(subject: ContractSubject) -> str:
    one = subject.technique
    if not isinstance(getattr(one, "stage", None), Stage) or not isinstance(getattr(one, "numerics", None), Numerics):
        return "it has no stage or no numerics"
    if (one.tolerance > 0) != (one.numerics is Numerics.ROUNDING):
        return f"its tolerance is {one.tolerance:g} and its numerics are {one.numerics.value}"
    if one.stage in HOW and one.numerics is Numerics.DIFFERENT:
        return f"stage {one.stage.label} changes how something is computed, but its numerics are different"
    return ""


def claims(subject: ContractSubject) -> str:
    one = subject.technique
    names = {field.name for field in fields(one)}
    if (one.micro_batches > 1) != ("micro_batches" in names):
        return f"micro_batches is {one.micro_batches} and {'a' if 'micro_batches' in names else 'no'} setting"
    if Claim.MICRO_BATCHES in one.claims and one.micro_batches == 1:
        return "it claims micro-batches but uses one"
    if (one.number_format == "float32") != (Claim.PRECISION not in one.claims):
        return f"its number format is {one.number_format}, and it claims {sorted(one.claims)}"
    if (one.recomputation == "none") != (Claim.RECOMPUTATION not in one.claims):
        return f"it recomputes {one.recomputation}, and it claims {sorted(one.claims)}"
    if Claim.OPTIMIZER in one.claims and not hasattr(one, "lr"):
        return "it is an optimizer without a setting lr"
    return ""


def seams(subject: ContractSubject) -> str:
    one, plain = subject.technique, subject.open()
    run, bare = Run(plain, (one,), subject.steps), Run(plain, (), subject.steps)
    for seam, mine, theirs in (
        ("batches", one.batches(plain.source), plain.source),
        ("objective", run.objective, plain.objective),
        ("backward", run.backward, bare.backward),
    ):
        if mine is not theirs and not one.overrides(seam):
            return f"{seam} changes although it is not overridden"
    return ""


def parameter_names(subject: ContractSubject) -> str:
    changed, plain = _names(subject.composed().build_model()), _names(subject.open().build())
    if lost := sorted(plain - changed):
        return f"{lost[0]} is missing"
    if subject.technique.stage in HOW and (added := sorted(changed - plain)):
        return f"stage {subject.technique.stage.label} adds {added[0]}"
    return ""


def order_of_techniques(subject: ContractSubject) -> str:
    plain = subject.open()
    same = subject.trained_as(open_plain=lambda: plain)
    one, other = same.composed(subject.techniques), same.composed(subject.techniques[::-1])
    return "" if one == other else "a run depends on the order in which techniques are listed"


def export(subject: ContractSubject) -> str:
    _, trace = train_observed(subject.trained_as(), subject.techniques)
    model, rebuilt = copy.deepcopy(trace.state.model), subject.open().build()
    assert model is not None
    before = subject.logits(model)
    try:
        finished = subject.technique.finish(model)
    except RefusedError as refused:
        if not refused.fix:
            return f"it refuses without a fix: {refused.what}"
        return "" if torch.equal(subject.logits(model), before) else "it refuses, but has changed the model"
    near = 1e-5 if before.dtype == torch.float32 else 1e-2 * float(before.abs().max())  # 16-bit weights
    if (difference := float((subject.logits(finished) - before).abs().max())) >= near:
        return f"the finished model's logits differ by {difference:.2g}"
    for other in subject.others:
        finished = other.finish(finished)
    if different := sorted(finished.state_dict().keys() ^ rebuilt.state_dict().keys()):
        return f"of the finished and the plain model, only one has {different[0]}"
    return ""


def explanation(subject: ContractSubject) -> str:
    run = subject.composed()
    explained = explain(run)
    if [row.technique for row in explained.rows] != [*run.techniques]:
        return "its explanation does not list the techniques of the run"
    return "" if explained.footprint.memory > 0 and explained.footprint.flops > 0 else "no memory or work is counted"


def refusal(subject: ContractSubject) -> str:
    try:
        subject.technique.model(nn.Sequential(nn.Linear(2, 2, bias=False)))
    except UsageError as refused:
        return "" if refused.what else "it refuses a model without a message"
    return ""


def it_learns(subject: ContractSubject) -> str:
    def repeated() -> BaseRun:
        plain = subject.open()
        return dataclasses.replace(plain, source=FirstBatchSource(plain.source))

    trace = train_observed(subject.trained_as(LEARNING_STEPS, repeated), subject.techniques)[1]
    first, last = trace.losses[0], trace.losses[-1]
    return "" if last < first else f"{LEARNING_STEPS} steps on one batch change the loss from {first:.4g} to {last:.4g}"


PROMISES: Mapping[str, Callable[[ContractSubject], str]] = {
    "stage and numerics": stage_and_numerics,
    "settings": settings,
    "claims": claims,
    "seams": seams,
    "parameter names": parameter_names,
    "order of techniques": order_of_techniques,
    "explanation": explanation,
    "export": export,
    "refusal": refusal,
    "it learns": it_learns,
}


class FirstBatchSource(WrappedSource):
    """Source that always repeats the first batch of another source. Any learning algorithm can fit this batch."""

    def __init__(self, source: BatchSource):
        self.source, self.batch = source, source.batch

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return self.source.rows(0, start, stop)


def contract(subject: ContractSubject, without: Sequence[str] = ()) -> Iterator[PromiseVerdict]:
    """Yield a verdict for each promise. If the promise "stage and numerics" is broken, no later promise is checked."""
    name = subject.technique.name
    for promise, find_fault in PROMISES.items():
        if promise in without:
            continue
        try:
            fault = find_fault(subject)
        except RefusedError as refused:
            yield not_applicable(promise, name, f"it refuses the tiny model: {refused.what}")
            continue
        except Exception as error:  # any technique may raise anything
            fault = one_line_error(error)
        yield broken(promise, name, fault, FIXES[promise]) if fault else holds(promise, name, "")
        if fault and promise == "stage and numerics":
            return


def _names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
