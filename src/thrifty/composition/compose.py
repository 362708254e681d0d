"""Composition of techniques with a plain run, in order of stage."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from thrifty.composition.state_transfer import transfer_state
from thrifty.core.backward import Backward, divided_by_parts, plain_backward
from thrifty.core.batches import BatchSource, MappedSource
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.objective import Objective
from thrifty.core.old_names import order_key
from thrifty.core.run_notes import collect_notes
from thrifty.core.run_relative_settings import fixed_moments, move_moments, resolve_moments
from thrifty.core.shard_layout import record_orders
from thrifty.core.stages import HOW, Stage
from thrifty.core.state import StructureLogEntry, TrainState, full_value
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Technique
from thrifty.optim.torch_optimizer import TransformOptimizer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class BaseRun:
    """The run without techniques. `build` returns the plain model with the same initial values at every call."""

    build: Callable[[], nn.Module]
    source: BatchSource
    objective: Objective
    is_trained: bool = False
    """True if the initial values come from training."""
    has_values: bool = True
    """False if model or examples have only shapes. A step can then only be counted on fake tensors."""


@dataclass
class Run:
    """A run with all its techniques applied."""

    plain: BaseRun
    techniques: tuple[Technique, ...]
    """The run's own copies of the techniques, with points in time as step numbers."""
    steps: int
    device: torch.device = CPU
    requested: tuple[Technique, ...] = ()
    """The techniques as requested, with points in time as steps or fractions of the run."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """Modules that each technique changed or skipped, recorded when the model is built."""

    @cached_property
    def source(self) -> BatchSource:
        """Training data. Techniques change the rows of the data, and the objective then makes examples from
        these rows."""
        source = self.plain.source
        for technique in self.techniques:
            source = technique.batches(source)
        return MappedSource(source, lambda step, batch: self.plain.objective.examples(batch))

    @cached_property
    def objective(self) -> Objective:
        objective = self.plain.objective
        for technique in self.techniques:
            with _named(technique):
                objective = technique.objective(objective)
        return objective

    @cached_property
    def eval_objective(self) -> Objective:
        """The objective for evaluation: computed as in the run, but without loss terms that techniques add. Held-out
        losses of runs with different techniques are therefore comparable."""
        objective = self.plain.objective
        for technique in self.techniques:
            if technique.stage < Stage.SOURCE:
                objective = technique.objective(objective)
        return objective

    @cached_property
    def backward(self) -> Backward:
        backward = self._wrapped_backward[0]
        return divided_by_parts(backward) if self.plain.objective.may_weigh_parts else backward

    @cached_property
    def memories(self) -> dict[str, dict[str, Tensor]]:
        """State that techniques keep between steps. It is part of the checkpoint. A backward pass of a technique stores
        its state in `self.state`, a dictionary of tensors that are initially zero."""
        return self._wrapped_backward[1]

    @cached_property
    def _wrapped_backward(self) -> tuple[Backward, dict[str, dict[str, Tensor]]]:
        backward, memories = plain_backward, {}
        for technique in reversed(self.techniques):
            inner, backward = backward, technique.backward(backward)
            if backward is not inner and hasattr(backward, "state"):
                memories[technique.name] = backward.state
        return backward, memories

    def change_length(self, steps: int, now: int) -> list[str]:
        """Change the number of steps after `now` finished steps. Points in time of techniques that are fractions of the
        run move too, if they are later than `now`. Return a notice for each fixed step that is after the new end but
        was before the old end."""
        notices = []
        for technique, requested in zip(self.techniques, self.requested, strict=True):
            move_moments(technique, requested, steps, now, self.steps)
            for name, moment in fixed_moments(technique).items():
                if steps < moment <= self.steps:
                    notices.append(
                        f"{technique.name}: {name} is step {moment}, after the new end of the run at step {steps}, "
                        "because steps take longer than first estimated"
                    )
        self.steps = steps
        return notices

    def transform(self) -> GradientTransform:
        """Return a new transform that computes the update of all techniques. Transforms store data per parameter, so
        each optimizer requires its own."""
        transform = GradientTransform()
        # stages of HOW decide how the whole chain is computed, so they wrap all others
        for technique in sorted(reversed(self.techniques), key=lambda technique: technique.stage in HOW):
            transform = technique.update(transform)
        return transform

    def build_model(self, log: Sequence[StructureLogEntry] = ()) -> nn.Module:
        """Return the model with initial values and all techniques applied. It has the structural changes in `log`."""
        model = self.plain.build()
        latest = {entry.technique: entry for entry in log}
        for technique in self.techniques:
            entry = latest.get(technique.name)
            if entry is None:
                continue
            if change := technique.changes(entry.step, TrainState(step=entry.step, log=list(log))):
                model = change.restructure(model)
        if any(parameter.device != self.device for parameter in model.parameters()):
            if empty := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
                raise UsageError(
                    f"the model was built on torch's meta device: {empty[0]!r} has no values",
                    fix="build it on the CPU, or load its weights with load_state_dict(weights, assign=True)",
                )
            model = model.to(self.device)
        for technique in self.techniques:
            with collect_notes() as notes, _named(technique):
                model = technique.model(model)
            self.notes[technique.name] = notes
        return record_orders(model)

    def init_state(self, log: Sequence[StructureLogEntry] = ()) -> TrainState:
        """Return a state with initial values. Its model has the structural changes in `log`."""
        model = self.build_model(log)
        optimizer = TransformOptimizer(model.named_parameters(), self.transform())
        return TrainState(model=model, optimizer=optimizer, techniques=self.memories, log=list(log))

    def start(self) -> TrainState:
        """Return the state before the first step, after structural changes at step 0."""
        for memory in self.memories.values():
            for tensor in memory.values():
                tensor.zero_()
        state = TrainState()
        for technique in self.techniques:
            if change := technique.changes(0, state):
                state.log.append(StructureLogEntry(0, technique.name, change.decision, change.reason))
        return self.init_state(state.log)

    def changes(self, state: TrainState) -> list[StructureLogEntry]:
        """Make every structural change that is due before the state's step. Return the log entries."""
        made = []
        for technique in self.techniques:
            if state.logged_decision(technique.name, state.step) is not None:
                continue
            if change := technique.changes(state.step, state):
                made.append(StructureLogEntry(state.step, technique.name, change.decision, change.reason))
                self._restructure(state, made[-1], change)
        return made

    def _restructure(self, state: TrainState, decision: StructureLogEntry, change: StructuralChange) -> None:
        old = {name: full_value(tensor) for name, tensor in state.tensors().items()}
        assert state.optimizer is not None
        updates, born, births = state.optimizer.updates, state.optimizer.born, state.optimizer.births
        state.log.append(decision)
        placed = self.init_state(state.log)
        transfer_state(change, old, placed)
        state.model, state.optimizer = placed.model, placed.optimizer
        assert state.optimizer is not None
        state.optimizer.updates = updates
        state.optimizer.born = updates if change.moments == "reset" else born
        state.optimizer.births = {} if change.moments == "reset" else births
        # the transferred masks are not yet applied to new state, such as an average
        state.optimizer.apply_constraints()
        gc.collect()  # the old model is in reference cycles with its wrappers

    def verify(self, state: TrainState) -> None:
        """Raise IntegrityError, with the technique's name, if a promise of a technique is broken."""
        for technique in self.techniques:
            technique.holds(state)


@contextmanager
def _named(technique: Technique) -> Iterator[None]:
    """Prefix a refusal that is raised inside the context with the technique's name."""
    try:
        yield
    except RefusedError as refused:
        if refused.what.startswith(technique.name):
            raise
        raise RefusedError(f"{technique.name}: {refused.what}", fix=refused.fix) from None


def compose(plain: BaseRun, techniques: Sequence[Technique], steps: int, device: torch.device = CPU) -> Run:
    """Return a run with the techniques in order of stage. Settings that are relative to the run, such as fractions of
    its steps, get absolute values. The order of `techniques` does not matter. Raise UsageError for techniques that
    cannot be combined."""
    ordered = sorted(techniques, key=lambda technique: (technique.stage, order_key(technique.name)))
    refuse_illegal(ordered)
    if plain.is_trained:
        refuse_trained_start(ordered)
    resolved = (resolve_moments(technique, steps, plain.source.batch) for technique in ordered)
    run = Run(plain, tuple(resolved), steps, device, tuple(ordered))
    _ = run.objective  # techniques that do not support the objective refuse before anything is built
    return run


def refuse_trained_start(techniques: Sequence[Technique]) -> None:
    """Raise RefusedError if a technique would change the function of trained weights."""
    for technique in techniques:
        if reason := technique.clashes.get(Claim.TRAINED_START):
            raise RefusedError(
                f"{technique.name} is not for trained weights: {reason}",
                fix=f"--without {technique.name}; or random initial weights: --set model.reinitialize=true for a "
                "folder, or a function that builds the model in place of the model",
            )


def refuse_illegal(techniques: Sequence[Technique]) -> None:
    """Raise UsageError, with the names and the reason, if two techniques claim the same part of a run or exclude each
    other."""
    claimed: dict[Claim, str] = {}
    for technique in techniques:
        if technique.name in (other.name for other in techniques if other is not technique):
            raise UsageError(f"{technique.name} is listed twice", fix=f"keep one {technique.name}")
        for claim in sorted(technique.claims):
            if claim in claimed:
                raise UsageError(
                    f"{claimed[claim]} and {technique.name} both decide the {claim}",
                    fix=f"keep one of them: --without {claimed[claim]}; or --without {technique.name}",
                )
            claimed[claim] = technique.name
    if Claim.OPTIMIZER not in claimed:
        raise UsageError("no technique decides the optimizer", fix="choose one: --with optimizers.adamw")
    for technique in techniques:
        for claim, reason in technique.clashes.items():
            if claim in claimed and claimed[claim] != technique.name:
                raise UsageError(
                    f"{technique.name} and {claimed[claim]} cannot be combined: {reason}",
                    fix=f"--without {technique.name}; or --without {claimed[claim]}",
                )
