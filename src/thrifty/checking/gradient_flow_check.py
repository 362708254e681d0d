"""Check that gradients reach all trained parameters, and that optimizer state is zero for masked weights."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds
from thrifty.checking.observed_runs import CheckSubject, StepObservations, gradients_of, train_observed
from thrifty.core.backward import plain_backward
from thrifty.core.claims import Claim
from thrifty.core.stages import HOW
from thrifty.core.state import TrainState, full_value
from thrifty.core.technique import Numerics
from thrifty.optim.weight_masks import SLOT, masks_in

NEEDED = 3
"""Minimum number of steps before every parameter must have a gradient. The gradient of LoRA's A, for example, is zero
until B has changed.
"""


def gradient_flow(subject: CheckSubject, trace: StepObservations) -> PromiseVerdict:
    """Check that every trained parameter has a gradient in some step, and report why other parameters have none."""
    starved = {name for name, steps in trace.steps_of.items() if steps >= NEEDED and name not in trace.reached}
    reasons = _frozen(subject, trace.state)
    if starved:
        masks = masks_in(trace.state)
        masked = {name for name in starved if name in masks and not bool(masks[name].any())}
        unused = _without_gradient_in_the_plain_run(subject) & (starved - masked)
        starved -= masked | unused
        if masked:
            reasons.append(f"{len(masked)} masked out ({_named(masked)})")
        if unused:
            reasons.append(f"{len(unused)} that are also unused in the plain run ({_named(unused)})")
    summary = f"{len(trace.reached)} parameters have gradients" + "".join(f"; {reason}" for reason in reasons)
    promise, about = "gradients arrive", "parameters"
    if not starved:
        return holds(promise, about, summary)
    suspects = _suspects(subject, starved)
    fix = (
        "; or ".join(f"--without {name}" for name in suspects)
        or "freeze these parameters; or use them in the forward pass"
    )
    text = f"{len(starved)} trained parameters have no gradient in {subject.steps} steps ({_named(starved)}); {summary}"
    return broken(promise, about, text, fix)


def _named(names: set[str]) -> str:
    first = sorted(names)[0]
    return first if len(names) == 1 else f"{first} and others"


def _frozen(subject: CheckSubject, state: TrainState) -> list[str]:
    """Return a text for each technique that froze parameters, with the number of these parameters."""
    assert state.model is not None
    frozen = {name for name, parameter in state.model.named_parameters() if not parameter.requires_grad}
    if not frozen:
        return []
    run = subject.composed(subject.alone)
    model, known, reasons = run.plain.build(), set[str](), []
    for about, change in [("the model itself", None), *((one.name, one) for one in run.techniques)]:
        if change is not None and (change.stage in HOW or not change.overrides("model")):
            continue
        model = model if change is None else change.model(model)
        now = {name for name, parameter in model.named_parameters() if not parameter.requires_grad} & frozen
        if now - known:
            reasons.append(f"{len(now - known)} frozen by {about}")
        known |= now
    if frozen - known:
        reasons.append(f"{len(frozen - known)} frozen in the run")
    return reasons


def _without_gradient_in_the_plain_run(subject: CheckSubject) -> set[str]:
    run = subject.composed([one for one in subject.alone if Claim.OPTIMIZER in one.claims])
    model = run.plain.build().to(subject.device)
    plain_backward(model, run.plain.objective, run.source.at(0).to(subject.device))
    return {name for name, gradient in gradients_of(model).items() if not bool(torch.count_nonzero(gradient))}


def _suspects(subject: CheckSubject, starved: set[str]) -> list[str]:
    """Return the techniques whose removal restores the gradients of the `starved` parameters."""
    suspects = []
    for one in subject.alone:
        if one.numerics is Numerics.DIFFERENT or not (one.overrides("model") or one.overrides("backward")):
            continue
        with suppress(Exception):  # a run that fails without the technique proves nothing
            _, trace = train_observed(subject, [other for other in subject.alone if other is not one], steps=NEEDED)
            if starved & trace.reached:
                suspects.append(one.name)
    return suspects


class ZeroWeightWatcher:
    """Watcher of weights that stay exactly zero from the first step on. It observes the state after each step."""

    def __init__(self) -> None:
        self.zeros: dict[str, Tensor] = {}
        self.looked = 0

    @torch.no_grad()
    def observe(self, state: TrainState) -> None:
        assert state.model is not None
        if not state.step:
            return
        parameters = {name: full_value(p) for name, p in state.model.named_parameters() if p.requires_grad}
        if self.looked:
            same = {name: zero for name, zero in self.zeros.items() if parameters[name].shape == zero.shape}
            self.zeros = {name: zero & (parameters[name] == 0) for name, zero in same.items()}
        else:
            self.zeros = {name: value == 0 for name, value in parameters.items()}
        self.zeros = {name: zero for name, zero in self.zeros.items() if bool(zero.any())}
        self.looked += 1

    def verdict(self, state: TrainState) -> Iterator[PromiseVerdict]:
        """Yield a verdict on optimizer state for weights that stay zero; yield nothing if there are no such weights."""
        assert state.optimizer is not None
        optimizer, worst = state.optimizer, ""
        for slot, tensors in optimizer.slots.items():
            if slot.endswith(SLOT) or optimizer.site.slot_kind(slot) == "weights":
                continue
            for name, tensor in zip(optimizer.names, tensors, strict=True):
                zero = self.zeros.get(name)
                if zero is None or tensor.shape != zero.shape:
                    continue
                count = int((full_value(tensor).to(zero.device) != 0).logical_and_(zero).sum())
                if count and not worst:
                    worst = f"{slot} of {name} has {count} values where the weight stays at zero"
        if not self.zeros or self.looked < NEEDED:
            return
        zero_weights = sum(int(zero.sum()) for zero in self.zeros.values())
        promise, about = "state under masks", "optimizer"
        if worst:
            yield broken(
                promise, about, worst, "mask gradients before the optimizer, and mask optimizer state when masks change"
            )
        else:
            yield holds(promise, about, f"no optimizer state for {zero_weights:,} weights that stay at zero")
