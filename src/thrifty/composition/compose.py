"""Techniques folded over the plain run, sorted by stage."""

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
from thrifty.core.run_relative_settings import resolve_moments
from thrifty.core.shard_layout import record_orders
from thrifty.core.stages import HOW, Stage
from thrifty.core.state import StructureLogEntry, TrainState, full_value
from thrifty.core.structural_change import StructuralChange
from thrifty.core.technique import Technique
from thrifty.optim.torch_optimizer import TransformOptimizer

CPU = torch.device("cpu")


@dataclass(frozen=True)
class BaseRun:
    """The run before any technique. `build` returns the plain model with its initial values, the same at every call."""

    build: Callable[[], nn.Module]
    source: BatchSource
    objective: Objective
    is_trained: bool = False
    """True if the initial values are trained ones."""
    has_values: bool = True
    """False if model or examples are shapes alone, so that a step can only be counted on fake tensors."""


@dataclass(frozen=True)
class Run:
    """What to run: every seam after all techniques had their say."""

    plain: BaseRun
    techniques: tuple[Technique, ...]
    steps: int
    device: torch.device = CPU
    notes: dict[str, list[str]] = field(default_factory=dict)
    """What each technique's surgery touched and skipped, filled when the model is built."""

    @cached_property
    def source(self) -> BatchSource:
        """What is trained on: techniques act on plain rows, of which the objective makes its examples last."""
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
        """The plain objective, computed as the run computes it but without what techniques add to the loss: held-out
        losses of runs with different techniques can be compared."""
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
        """What techniques remember between steps. A Backward that must remember something keeps it in `self.state`,
        a dict of tensors that start at zero; it is found here and belongs to the checkpoint."""
        return self._wrapped_backward[1]

    @cached_property
    def _wrapped_backward(self) -> tuple[Backward, dict[str, dict[str, Tensor]]]:
        backward, memories = plain_backward, {}
        for technique in reversed(self.techniques):
            inner, backward = backward, technique.backward(backward)
            if backward is not inner and hasattr(backward, "state"):
                memories[technique.name] = backward.state
        return backward, memories

    def transform(self) -> GradientTransform:
        """A fresh chain: transforms learn the parameters they meet, so each optimizer gets its own."""
        transform = GradientTransform()
        # how something is computed is decided of all of it: such techniques come around the others
        for technique in sorted(reversed(self.techniques), key=lambda technique: technique.stage in HOW):
            transform = technique.update(transform)
        return transform

    def build_model(self, log: Sequence[StructureLogEntry] = ()) -> nn.Module:
        """The model at the structure that the log describes, with all techniques applied, at its first values."""
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
        """A state at the structure of the log, at its first values; a caller that has values fills them in."""
        model = self.build_model(log)
        optimizer = TransformOptimizer(model.named_parameters(), self.transform())
        return TrainState(model=model, optimizer=optimizer, techniques=self.memories, log=list(log))

    def start(self) -> TrainState:
        """The state before the first step, structural changes that are due at once included."""
        for memory in self.memories.values():
            for tensor in memory.values():
                tensor.zero_()
        state = TrainState()
        for technique in self.techniques:
            if change := technique.changes(0, state):
                state.log.append(StructureLogEntry(0, technique.name, change.decision, change.reason))
        return self.init_state(state.log)

    def changes(self, state: TrainState) -> list[StructureLogEntry]:
        """Make every change that is due before the state's step, and say what was decided."""
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
        # what started afresh (an average) knows nothing of masks that were carried along
        state.optimizer.apply_constraints()
        gc.collect()  # the old model is in cycles with what was wrapped around its modules

    def verify(self, state: TrainState) -> None:
        """Ask every technique whether its promise still holds; raises IntegrityError with its name when not."""
        for technique in self.techniques:
            technique.holds(state)


@contextmanager
def _named(technique: Technique) -> Iterator[None]:
    """Says whose refusal it is."""
    try:
        yield
    except RefusedError as refused:
        if refused.what.startswith(technique.name):
            raise
        raise RefusedError(f"{technique.name}: {refused.what}", fix=refused.fix) from None


def compose(plain: BaseRun, techniques: Sequence[Technique], steps: int, device: torch.device = CPU) -> Run:
    """Sort by stage, fill in settings that depend on the run, refuse what cannot go together. The order given is
    irrelevant."""
    ordered = sorted(techniques, key=lambda technique: (technique.stage, order_key(technique.name)))
    refuse_illegal(ordered)
    if plain.is_trained:
        refuse_trained_start(ordered)
    resolved = (resolve_moments(technique, steps, plain.source.batch) for technique in ordered)
    run = Run(plain, tuple(resolved), steps, device)
    _ = run.objective  # a technique that cannot serve it says so before anything is built
    return run


def refuse_trained_start(techniques: Sequence[Technique]) -> None:
    """Raise RefusedError if a technique would take away what trained weights compute."""
    for technique in techniques:
        if reason := technique.clashes.get(Claim.TRAINED_START):
            raise RefusedError(
                f"{technique.name} is not for trained weights: {reason}",
                fix=f"--without {technique.name}, or a new run from random weights: --set model.reinitialize=true",
            )


def refuse_illegal(techniques: Sequence[Technique]) -> None:
    """Raises UsageError when two techniques claim the same thing or cannot live together, saying which and why."""
    claimed: dict[Claim, str] = {}
    for technique in techniques:
        if technique.name in (other.name for other in techniques if other is not technique):
            raise UsageError(f"{technique.name} is given twice", fix="keep one of them")
        for claim in sorted(technique.claims):
            if claim in claimed:
                raise UsageError(
                    f"{claimed[claim]} and {technique.name} both decide the {claim}",
                    fix=f"keep one of them, for instance --without {claimed[claim]}",
                )
            claimed[claim] = technique.name
    if Claim.OPTIMIZER not in claimed:
        raise UsageError("no technique decides the optimizer", fix="choose one: --with optimizers.adamw")
    for technique in techniques:
        for claim, reason in technique.clashes.items():
            if claim in claimed and claimed[claim] != technique.name:
                raise UsageError(
                    f"{technique.name} and {claimed[claim]} cannot go together: {reason}",
                    fix=f"--without {technique.name} or --without {claimed[claim]}",
                )
