"""Check that a stopped, saved and resumed run equals the uninterrupted run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds
from thrifty.checking.observed_runs import (
    CheckSubject,
    StepObservations,
    advance,
    is_equal,
    is_same,
    one_line_error,
)
from thrifty.composition.compose import Run
from thrifty.core.plain_values import build, to_data
from thrifty.core.state import TrainState, read_log
from thrifty.training import checkpoint
from thrifty.training.state_loading import load_state


class StateSaver:
    """Saver of a run's state into a folder, once, after a given step."""

    def __init__(self, folder: Path, step: int):
        self.folder, self.step = folder, step

    def observe(self, state: TrainState) -> None:
        if state.step == self.step:
            checkpoint.save(self.folder, state.step, state.tensors(), state.scalars())


def check_resume(subject: CheckSubject, trace: StepObservations, saved: StateSaver) -> PromiseVerdict:
    """Load the saved state into a newly composed run, train to the end, and compare with the uninterrupted run."""
    promise, about = "resume", "checkpoint"
    # rebuild techniques from their settings, so that no state of this process remains in them
    again = replace(subject, techniques=tuple(build(type(one), to_data(one)) for one in subject.techniques))
    run = again.composed(again.alone)
    try:
        stored = checkpoint.find(saved.folder)
        state = run.init_state(read_log(stored.scalars))
        load_state(state, stored)
        resumed = StepObservations(state)
        advance(run, resumed, subject.seed)
    except Exception as error:  # any technique may raise anything
        fix = "store all state of techniques in the run's state"
        return broken(promise, about, f"it cannot be resumed: {one_line_error(error)}", fix)
    if difference := _difference(run, resumed, trace, stored.step):
        fix = "store a technique's state in the run's state, and make data depend on the step alone"
        return broken(promise, about, f"stopped after step {stored.step} and resumed, {difference}", fix)
    steps, count = len(trace.losses), len(trace.tensors())
    return holds(promise, about, f"stopped after {stored.step} of {steps} steps: {count} tensors the same")


def _difference(run: Run, resumed: StepObservations, trace: StepObservations, step: int) -> str:
    for number, (one, other) in enumerate(zip(resumed.losses, trace.losses[step:], strict=True), start=step + 1):
        if not is_same(one, other):
            return f"the loss of step {number} is {one:.9g}, not {other:.9g}"
    now, then = resumed.tensors(), trace.tensors()
    if now.keys() != then.keys():
        return f"the state has different tensors, such as {sorted(now.keys() ^ then.keys())[0]}"
    for name, tensor in then.items():
        if not is_equal(now[name], tensor):
            return f"{name} differs after {run.steps} steps"
    if _scalars(resumed.state) != _scalars(trace.state):
        return "its counters or its log of changes differ"
    return ""


def _scalars(state: TrainState) -> dict[str, Any]:
    scalars = json.loads(json.dumps(state.scalars()), parse_constant=str)  # NaN equals NaN as text
    scalars["counters"].pop("seconds", None)
    return scalars
