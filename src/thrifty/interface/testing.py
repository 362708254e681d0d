"""Contract test of techniques, for third-party packages."""

import time
from typing import Any

import numpy as np
import torch

from thrifty.checking.check_verdicts import CheckReport, PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.observed_runs import DRAWING, CheckSubject, one_line_error, train_observed
from thrifty.checking.promise_check import check_run
from thrifty.checking.technique_contract import ContractSubject, contract
from thrifty.composition.compose import BaseRun
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, NeedsTrainer, RefusedError, UsageError
from thrifty.core.randomness import start_draws
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.interface.optimizers import optimizer_class
from thrifty.interface.own_loop import apply, technique_of
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.linear import LinearDecay
from thrifty.training.loop import step_seed

STEPS = 6
VOCABULARY, LENGTH, BATCH = 64, 16, 4
CLOSE = 1e-5
"""Maximum relative difference of losses between a user's loop and the trainer."""
IN_FEW_BITS = 0.02
"""Maximum relative difference of losses, for techniques in low precision, and for techniques that sample examples or
gradient values."""


def check_technique(technique: type[Technique] | Technique | str, **settings: Any) -> CheckReport:
    """Test a technique as Thrifty tests its own techniques, on a model of two blocks, in a few seconds.

    The test covers settings, stage, claims, overridden methods, parameter names, explanation, export and learning. It
    also covers promised values, gradients, micro-batches and resume, and equal losses in a user's loop and the trainer.
    If the technique refuses the small model, the promise is reported as not applicable.

    `technique` is a class, an object or a name. `settings` are its fields.

    Raises IntegrityError that lists each broken promise and its fix.

    Example::

        class Halved(thrifty.Technique):
            stage, numerics = thrifty.Stage.PRECONDITION, thrifty.Numerics.DIFFERENT

        print(thrifty.testing.check_technique(Halved))
    """
    began, one = time.monotonic(), technique_of(technique, settings)
    others = tuple(
        other
        for other in (AdamW(lr=3e-3), GradientClipping(), LinearDecay())
        if not other.claims & one.claims and other.name != one.name
    )
    subject = ContractSubject(one, others, _plain_run, STEPS)
    verdicts = [*contract(subject)]
    if verdicts[0].outcome == "holds":
        optimizer = others[:1] if Claim.OPTIMIZER not in one.claims else ()
        for part in (lambda: check_run(_plain_run, (one, *optimizer), STEPS), lambda: [_own_loop(one)]):
            try:
                verdicts += part()
            except RefusedError as refused:
                verdicts.append(not_applicable("values", one.name, f"it refuses the tiny model: {refused.what}"))
    cuts = (f"{STEPS} steps of a model of two blocks",)
    report = CheckReport(one.name, tuple(verdicts), cuts, (), round(time.monotonic() - began, 1))
    if report.broken:
        said = (f"{each.promise}: {each.measured}\n  fix: {each.fix}" for each in report.broken)
        raise IntegrityError("\n".join([f"{one.name} breaks its contract", *said]))
    return report


def _plain_run() -> BaseRun:
    """Return the run of a small language model on a deterministic token sequence."""
    tokens = np.cumsum(np.arange(3000) % 7 + 1).astype(np.uint16) % VOCABULARY

    def model() -> torch.nn.Module:
        made = assemble(ModelConfig("llama", 2, 32, 4, 2, 64, VOCABULARY, LENGTH + 8, True))
        initialize(made, 0, std=0.1)
        return made

    return BaseRun(model, PackedTokens(tokens, LENGTH, BATCH, seed=0), NextToken())


def _own_loop(one: Technique) -> PromiseVerdict:
    """Compare the losses of a user's loop with the trainer's losses."""
    promise, plain = "own loop", _plain_run()
    model = plain.build().train()
    optimizer = AdamW(lr=3e-3) if Claim.OPTIMIZER not in one.claims else one
    try:
        by_hand = optimizer_class(type(optimizer))(model, total_steps=STEPS, **vars(optimizer))
        if optimizer is not one:
            apply((model, by_hand), one, total_steps=STEPS)
    except NeedsTrainer as refused:
        return not_applicable(promise, one.name, refused.what)
    except UsageError as refused:
        return not_applicable(promise, one.name, f"it refuses: {refused.what}")
    losses = []
    for step in range(STEPS):
        start_draws(step_seed(0, step, 0), torch.device("cpu"))
        batch = plain.source.at(step)
        loss = (plain.objective.losses(plain.objective.predict(model, batch), batch) * batch.weight).sum()
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        losses.append(float(loss.detach()))
    techniques = (one,) if optimizer is one else (one, optimizer)
    try:
        wanted = train_observed(CheckSubject(_plain_run, techniques, STEPS), techniques)[1].losses
    except Exception as error:  # already reported by the other promises
        return not_applicable(promise, one.name, one_line_error(error))
    worst = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, wanted, strict=True))
    rounds = one.is_low_precision or one.stage in DRAWING
    if worst > (IN_FEW_BITS if rounds else max(CLOSE, one.tolerance)):
        fix = "make change_forward and hook_steps equivalent to objective, backward and changes"
        return broken(promise, one.name, f"losses differ from the trainer's by {worst:.2g}", fix)
    return holds(promise, one.name, f"losses of {STEPS} steps equal the trainer's within {worst:.1g}")
