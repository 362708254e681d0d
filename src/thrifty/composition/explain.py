"""Predicted memory and work of a composed run, technique by technique.

To count the effect of each technique, the run with all techniques up to it is built on fake tensors, and one step is
traced. Techniques that override `footprint` add effects that one process of fake tensors cannot show, such as other
ranks or values. A lower memory use of compiled code is not counted. A model that reads values cannot run on fake
tensors. Such a model is counted on a real batch.
"""

import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.composition.compose import CPU, Run
from thrifty.composition.fake_runs import on_fakes, without_log
from thrifty.composition.foreign_parameters import ForeignParametersError, WatchedObjective
from thrifty.composition.micro_batches import data_shard_count, representative_micro_batches
from thrifty.composition.step_footprint import CountedPasses
from thrifty.composition.torch_update import TorchOptimizer
from thrifty.core.batch_norms import batch_norms, effective_numerics
from thrifty.core.batches import Batch, any_examples
from thrifty.core.errors import RefusedError, ThriftyError, reason_of
from thrifty.core.footprint import Footprint
from thrifty.core.out_of_memory import is_out_of_memory
from thrifty.core.randomness import GeneratorStates
from thrifty.core.run_notes import add_note, collect_notes
from thrifty.core.shard_layout import local_tensors
from thrifty.core.technique import Numerics, Technique
from thrifty.core.tensor_tracing import StepTrace, gc_frozen, one_thread, tensor_bytes
from thrifty.machine.machine_info import free_memory
from thrifty.optim.torch_optimizer import TransformOptimizer

IN_PASSES = ("model", "batches", "objective", "backward")
COUNTED = (*IN_PASSES, "update")
"""Methods whose effect on memory and work a traced step shows."""
OF_EXAMPLES = ("hidden", "activations", "saved", "passes", "inside", "temporary")
"""Fields of a footprint that are proportional to the number of examples on a rank."""


@dataclass(frozen=True)
class TechniqueFootprint:
    """Footprints of a run without and with one technique."""

    technique: Technique
    before: Footprint
    after: Footprint
    numerics: Numerics
    """Numerical promise of the technique for this model."""

    def as_dict(self, touched: Sequence[str]) -> dict[str, Any]:
        return {
            "name": self.technique.name,
            "stage": self.technique.stage.label,
            "numerics": self.numerics.value,
            "settings": asdict(self.technique),
            "touched": list(touched),
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
        }


@dataclass(frozen=True)
class Explanation:
    parameters: int
    plain: Footprint
    rows: tuple[TechniqueFootprint, ...]
    decisions: tuple[str, ...] = ()
    """Decisions that techniques make at the first batch."""

    @property
    def footprint(self) -> Footprint:
        return self.rows[-1].after if self.rows else self.plain

    def as_dict(self, notes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return the explanation as a dictionary. `notes` has the modules that each technique changed or skipped
        (`Run.notes`)."""
        return {
            "parameters": self.parameters,
            "techniques": [row.as_dict(notes.get(row.technique.name, ())) for row in self.rows],
            "plain": self.plain.as_dict(),
            "footprint": self.footprint.as_dict(),
            "decisions": list(self.decisions),
        }


def explain(run: Run, refuses_foreign: bool = False) -> Explanation:
    """Return the footprints without techniques and after each technique, for the run's final structure and last
    batch. With `refuses_foreign`, raise UsageError if the loss depends on trained parameters outside the model."""
    with gc_frozen():
        return _explained(run, refuses_foreign)


def _explained(run: Run, refuses_foreign: bool) -> Explanation:
    counts = _RunCounts(run, refuses_foreign)
    parameters, counted = counts.of(())
    plain, before = counted, counted
    rows: list[TechniqueFootprint] = []
    for index, technique in enumerate(run.techniques):
        so_far = run.techniques[: index + 1]
        shards = data_shard_count(so_far)
        is_counted = not technique.overrides("footprint") and technique.overrides(*COUNTED)
        if is_counted or shards > data_shard_count(so_far[:-1]):
            counted = _counted_with(counts, technique, so_far, shards)
        after = counted
        for claimed in so_far:
            after = claimed.footprint(after)
        rows.append(TechniqueFootprint(technique, before, after, effective_numerics(technique, counts.batch_norms)))
        before = after
    _try_first_batch(run)
    return Explanation(parameters, plain, tuple(rows), tuple(counts.decisions))


def _try_first_batch(run: Run) -> None:
    """Raise RefusedError if the step fails on the first batch, whose examples a curriculum made smaller."""
    changing = [technique for technique in run.techniques if technique.overrides("batches")]
    if not changing:
        return
    with any_examples():
        first, last = (run.source.at(step) for step in (0, run.steps - 1))
    if _sizes(first) == _sizes(last):
        return
    try:
        _RunCounts(run).passes_on(first)
    except Exception as error:
        if isinstance(error, ThriftyError) or is_out_of_memory(error):
            raise
        name = next((each.name for each in changing if _sizes(_first_batch_without(run, each)) != _sizes(first)), "")
        name = name or changing[-1].name
        shown = ", ".join(f"{name} {size}" for name, size in _sizes(first).items() if size != _sizes(last).get(name))
        raise RefusedError(
            f"{name} changes the examples of the first step ({shown}), which this model does not accept: "
            f"{reason_of(error)}",
            fix=f"--without {name}; or use a model that accepts examples of any size",
        ) from error


def _first_batch_without(run: Run, technique: Technique) -> Batch:
    others = tuple(each for each in run.techniques if each is not technique)
    return replace(run, techniques=others, notes={}).source.at(0)


def _sizes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(values.shape[1:]) for name, values in batch.fields.items()}


def _counted_with(counts: "_RunCounts", technique: Technique, so_far: tuple[Technique, ...], shards: int) -> Footprint:
    """Return the footprint with the techniques `so_far`, of which `technique` is the last. Raise RefusedError if the
    step fails with it, because the step without it did not."""
    try:
        return counts.of(tuple(t for t in so_far if not t.overrides("footprint")), shards)[1]
    except Exception as error:
        if isinstance(error, ThriftyError) or is_out_of_memory(error):
            raise
        raise RefusedError(
            f"{technique.name} does not work on this model: {reason_of(error)}", fix=f"--without {technique.name}"
        ) from error


def count(run: Run, techniques: tuple[Technique, ...], shards: int = 1) -> tuple[int, Footprint]:
    """Return the number of parameters and the footprint of one step, for the run with only these techniques. If the
    examples are divided into `shards`, bytes are for one shard and FLOPs for all shards."""
    return _RunCounts(run).of(techniques, shards)


class _RunCounts:
    """Footprints of a run with some of its techniques. If techniques differ from the previous ones only in the update,
    forward and backward pass are not traced again."""

    def __init__(self, run: Run, refuses_foreign: bool = False):
        self.run, self._refuses_foreign = run, refuses_foreign
        self.decisions: list[str] = []
        """Decisions at the first batch of the techniques that were traced last."""
        self._fake: FakeTensorMode | None = FakeTensorMode(allow_non_fake_inputs=True)
        """None if the model requires real tensors."""
        self._key: tuple[tuple[Technique, ...], int] | None = None

    @property
    def batch_norms(self) -> list[str]:
        return batch_norms(self._passes.model)

    def of(self, techniques: tuple[Technique, ...], shards: int = 1) -> tuple[int, Footprint]:
        with collect_notes() as notes:
            parameters, footprint = self._of(techniques, shards)
        self.decisions = [*dict.fromkeys([*notes, *self._notes_of_passes])]
        return parameters, footprint

    def _of(self, techniques: tuple[Technique, ...], shards: int) -> tuple[int, Footprint]:
        part = replace(self.run, techniques=techniques, notes={})
        with any_examples():
            whole = part.source.at(self.run.steps - 1)
        is_joint = self.run.objective.joint  # each rank compares its examples with those of all ranks
        shard = whole if is_joint else whole.rows(0, -(-len(whole) // shards))
        part, batch, times = representative_micro_batches(part, shard)
        key = tuple(technique for technique in techniques if technique.overrides(*IN_PASSES)), shards
        if key != self._key:
            self._key = None
            with collect_notes() as self._notes_of_passes:
                self._passes = self._counted_passes(part, batch)
            self._key = key
        with self._fake or nullcontext(), one_thread():
            skips_missing = any(isinstance(technique, TorchOptimizer) for technique in techniques)
            footprint = self._passes.followed_by(part.transform(), part.steps, skips_missing)
        if is_joint:
            footprint = footprint.scale(**dict.fromkeys(OF_EXAMPLES, 1 / shards))
        parameters = sum(parameter.numel() for parameter in self._passes.model.parameters())
        passes = footprint.scale(flops=times * len(whole) / len(shard))
        return parameters, passes.add(flops=footprint.update_flops)

    def passes_on(self, whole: Batch) -> None:
        """Trace the run's forward and backward pass on a batch."""
        part, batch, _ = representative_micro_batches(replace(self.run, notes={}), whole)
        with collect_notes():
            self._counted_passes(part, batch)

    def _counted_passes(self, part: Run, batch: Batch) -> CountedPasses:
        casts = part.device.type == "cpu"
        if self._fake is not None:
            try:
                with self._fake as fake, without_log():
                    return self._watched(on_fakes(part, fake), batch.map(fake.from_tensor), casts=casts)
            except ForeignParametersError as error:
                # a model may refer to its parameters outside its modules too, and such references stay real
                self._fake, self._needs_values = None, error.what
            except ThriftyError:
                raise
            except Exception as error:  # the model reads values, or calls code without support for fake tensors
                if not part.plain.has_values:
                    raise _refusal_without_values(error) from error
                self._fake, self._needs_values = None, reason_of(error)
        add_note(f"counted on a real batch, since fake tensors do not suffice: {self._needs_values}")
        self._passes = None
        gc.collect()  # free the previous model, because it is in reference cycles
        if part.device.type == "cuda" and not torch.cuda.is_available():
            part = replace(part, device=CPU)  # this machine has no such device
        with unset_fake_temporarily(), GeneratorStates([part.device]).restored():
            return self._largest_passes(part, batch.to(part.device), casts)

    def _watched(self, part: Run, batch: Batch, limit: float = inf, casts: bool = True) -> CountedPasses:
        return passes_of(part, batch, limit, casts, self._refuses_foreign and not part.techniques)

    def _largest_passes(self, part: Run, batch: Batch, casts: bool) -> CountedPasses:
        """Return the passes on a real batch. If the model drops layers at random, return the passes with all layers."""
        counted: list[CountedPasses] = []
        failure: Exception | None = None
        for value in (1 - 2**-24, 0.0):
            with _SingleDraws(value) as draws:
                try:
                    counted.append(self._watched(part, batch, free_memory(part.device), casts))
                except Exception as error:  # without any layer, a loss has no gradient
                    failure = error
            if not draws.seen:
                break
        if not counted:
            assert failure is not None
            raise failure
        return max(counted, key=lambda passes: passes.peak)


class _SingleDraws(TorchDispatchMode):
    """Mode that sets each random tensor of one element to `value`. Models compare such a tensor with the probability to
    drop a layer. A step that drops no layer is the largest."""

    def __init__(self, value: float):
        super().__init__()
        self.value, self.seen = value, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_random = torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor)
        if is_random and result.numel() == 1 and result.is_floating_point():
            result.fill_(self.value)
            self.seen = True
        return result


def _refusal_without_values(error: Exception) -> Exception:
    """Return the error to raise if a step does not run on fake tensors, and there are no real tensors."""
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return error
    return RefusedError(
        f"shapes or branches of the step depend on values, which meta tensors do not have: {reason_of(error)}",
        fix="pass a model and a batch that are not on the meta device, or a function that builds the model",
    )


def passes_of(
    run: Run, batch: Batch, limit: float = inf, casts: bool = True, refuses_foreign: bool = False
) -> CountedPasses:
    """Return the traced passes of a run's model on a batch of real or fake tensors. Counting stops at more than `limit`
    bytes. See `StepTrace` for `casts`. With `refuses_foreign`, raise ForeignParametersError if the loss depends on
    trained parameters outside the model."""
    with one_thread():
        with StepTrace(limit=limit, casts=casts) as built:
            model = run.build_model()
        watched = WatchedObjective(run.objective, model)
        passes = CountedPasses(model, watched if refuses_foreign else run.objective, run.backward, batch, built)
        watched.refuse_foreign()
        return passes


def touched_modules(run: Run) -> dict[str, list[str]]:
    """Return the modules that each technique changes or skips, found on fake tensors. Raises RefusedError if a
    technique refuses the model."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        trial = replace(on_fakes(run, fake), notes={})
        trial.build_model()
    return trial.notes


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes of a rank between steps, and the modules that techniques changed on the rank."""

    parameters: int
    gradients: int
    optimizer: int
    notes: Mapping[str, Sequence[str]]


def resident_bytes(run: Run) -> ResidentBytes:
    """Return this rank's bytes with all techniques, computed on fake tensors. Techniques run outside the fake mode,
    because torch cannot determine mesh positions inside it. New tensors that techniques create, such as tensors of an
    adapter, are therefore real. Raise RefusedError if a technique refuses the model."""
    trial = replace(on_fakes(run, FakeTensorMode(allow_non_fake_inputs=True)), notes={})
    model = trial.build_model()
    optimizer = TransformOptimizer(model.named_parameters(), trial.transform())
    state = [tensor for tensors in optimizer.slots.values() for tensor in tensors]
    resident = ([*model.parameters()], optimizer.parameters, state)
    return ResidentBytes(*(sum(map(tensor_bytes, local_tensors(tensors))) for tensors in resident), trial.notes)
