"""What a composed run will hold and compute, technique by technique, before it runs.

Techniques are counted, not believed: for each one the run so far is built on fake tensors and a step of it is traced.
Only those that override `footprint` are taken at their word, on top of the count: their effect needs what a single
process of fake tensors does not have (other ranks, values). What a compiler saves beyond that is not counted. A model
that fake tensors do not run, because it asks for their values, is counted on a real batch.
"""

import copy
import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from thrifty.composition.compose import CPU, BaseRun, Run
from thrifty.composition.micro_batches import data_shard_count, representative_micro_batches
from thrifty.composition.step_footprint import CountedPasses
from thrifty.composition.torch_update import TorchOptimizer
from thrifty.core.batch_norms import batch_norms, effective_numerics
from thrifty.core.batches import Batch
from thrifty.core.errors import RefusedError, ThriftyError, reason_of
from thrifty.core.footprint import Footprint
from thrifty.core.randomness import GeneratorStates, preserved_draws
from thrifty.core.run_notes import add_note, collect_notes
from thrifty.core.shard_layout import local_tensors
from thrifty.core.technique import Numerics, Technique
from thrifty.core.tensor_tracing import StepTrace, gc_frozen, one_thread, tensor_bytes, untraced
from thrifty.machine.machine_info import free_memory
from thrifty.optim.torch_optimizer import TransformOptimizer

IN_PASSES = ("model", "batches", "objective", "backward")
COUNTED = (*IN_PASSES, "update")
"""Seams whose effect on memory and work shows in a traced step."""
OF_EXAMPLES = ("hidden", "activations", "saved", "passes", "inside", "temporary")
"""What is in proportion to the examples that a rank sees."""


@dataclass(frozen=True)
class TechniqueFootprint:
    """One technique, and the footprint before and after it."""

    technique: Technique
    before: Footprint
    after: Footprint
    numerics: Numerics
    """The promise of the technique on values of this model."""

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
    """What techniques decide when they see the first batch."""

    @property
    def footprint(self) -> Footprint:
        return self.rows[-1].after if self.rows else self.plain

    def as_dict(self, notes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Plain data; `notes` are what each technique's surgery touched and skipped (`Run.notes`)."""
        return {
            "parameters": self.parameters,
            "techniques": [row.as_dict(notes.get(row.technique.name, ())) for row in self.rows],
            "plain": self.plain.as_dict(),
            "footprint": self.footprint.as_dict(),
            "decisions": list(self.decisions),
        }


def explain(run: Run) -> Explanation:
    """Footprints of the plain run and after each technique, at the run's full structure and last batch."""
    with gc_frozen():
        return _explained(run)


def _explained(run: Run) -> Explanation:
    counts = _RunCounts(run)
    parameters, counted = counts.of(())
    plain, before = counted, counted
    rows: list[TechniqueFootprint] = []
    for index, technique in enumerate(run.techniques):
        so_far = run.techniques[: index + 1]
        shares = data_shard_count(so_far)
        is_counted = not technique.overrides("footprint") and technique.overrides(*COUNTED)
        if is_counted or shares > data_shard_count(so_far[:-1]):
            _, counted = counts.of(tuple(t for t in so_far if not t.overrides("footprint")), shares)
        after = counted
        for claimed in so_far:
            after = claimed.footprint(after)
        rows.append(TechniqueFootprint(technique, before, after, effective_numerics(technique, counts.batch_norms)))
        before = after
    return Explanation(parameters, plain, tuple(rows), tuple(counts.decisions))


def count(run: Run, techniques: tuple[Technique, ...], shares: int = 1) -> tuple[int, Footprint]:
    """The number of parameters, and one step's footprint, of the run with only these techniques; of several `shares`
    into which its examples are divided, the bytes are those of one and the FLOPs those of all."""
    return _RunCounts(run).of(techniques, shares)


class _RunCounts:
    """Counts of a run with some of its techniques. Where those differ from the ones before in the update alone, the
    passes through the model are not traced again."""

    def __init__(self, run: Run):
        self.run = run
        self.decisions: list[str] = []
        """What the techniques that were counted last decide when they see the first batch."""
        self._fake: FakeTensorMode | None = FakeTensorMode(allow_non_fake_inputs=True)
        """None once the model has turned out to need real tensors."""
        self._key: tuple[tuple[Technique, ...], int] | None = None

    @property
    def batch_norms(self) -> list[str]:
        return batch_norms(self._passes.model)

    def of(self, techniques: tuple[Technique, ...], shares: int = 1) -> tuple[int, Footprint]:
        with collect_notes() as said:
            parameters, footprint = self._of(techniques, shares)
        self.decisions = [*dict.fromkeys([*said, *self._said_in_passes])]
        return parameters, footprint

    def _of(self, techniques: tuple[Technique, ...], shares: int) -> tuple[int, Footprint]:
        part = replace(self.run, techniques=techniques, notes={})
        whole = part.source.at(self.run.steps - 1)
        is_joint = self.run.objective.joint  # each rank compares its own examples with everybody's
        share = whole if is_joint else whole.rows(0, -(-len(whole) // shares))
        part, batch, times = representative_micro_batches(part, share)
        key = tuple(technique for technique in techniques if technique.overrides(*IN_PASSES)), shares
        if key != self._key:
            self._key = None
            with collect_notes() as self._said_in_passes:
                self._passes = self._counted_passes(part, batch)
            self._key = key
        with self._fake or nullcontext(), one_thread():
            skips_missing = any(isinstance(technique, TorchOptimizer) for technique in techniques)
            footprint = self._passes.followed_by(part.transform(), part.steps, skips_missing)
        if is_joint:
            footprint = footprint.scale(**dict.fromkeys(OF_EXAMPLES, 1 / shares))
        parameters = sum(parameter.numel() for parameter in self._passes.model.parameters())
        return parameters, footprint.scale(flops=times * len(whole) / len(share))

    def _counted_passes(self, part: Run, batch: Batch) -> CountedPasses:
        casts = part.device.type == "cpu"
        if self._fake is not None:
            try:
                with self._fake as fake, without_log():
                    return passes_of(on_fakes(part, fake), batch.map(fake.from_tensor), casts=casts)
            except ThriftyError:
                raise
            except Exception as error:  # values are asked for, or something is called that knows no fake tensors
                if not part.plain.has_values:
                    raise _refusal_without_values(error) from error
                self._fake, self._needs_values = None, reason_of(error)
        add_note(f"counted on a real batch, since fake tensors do not suffice: {self._needs_values}")
        self._passes = None
        gc.collect()  # of the model before, which is in cycles, nothing stays beside this one
        if part.device.type == "cuda" and not torch.cuda.is_available():
            part = replace(part, device=CPU)  # one that is not here
        with unset_fake_temporarily(), GeneratorStates([part.device]).restored():
            return self._largest_passes(part, batch.to(part.device), casts)

    def _largest_passes(self, part: Run, batch: Batch, casts: bool) -> CountedPasses:
        """Return the passes on a real batch: those with all layers, of a model that leaves out layers at random."""
        counted: list[CountedPasses] = []
        failure: Exception | None = None
        for value in (1 - 2**-24, 0.0):
            with _SingleDraws(value) as draws:
                try:
                    counted.append(passes_of(part, batch, free_memory(part.device), casts))
                except Exception as error:  # without any layer a loss has no gradient
                    failure = error
            if not draws.seen:
                break
        if not counted:
            assert failure is not None
            raise failure
        return max(counted, key=lambda passes: passes.peak)


class _SingleDraws(TorchDispatchMode):
    """Give each random tensor of one element this value. Models compare such with the probability to leave out a layer,
    and the largest step leaves out none."""

    def __init__(self, value: float):
        super().__init__()
        self.value, self.seen = value, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor)
        if is_drawn and result.numel() == 1 and result.is_floating_point():
            result.fill_(self.value)
            self.seen = True
        return result


@contextmanager
def without_log() -> Iterator[None]:
    """Without torch's record of an operation that fails on fake tensors: its error is raised all the same."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _refusal_without_values(error: Exception) -> Exception:
    """Return the error to raise where a step does not run on fake tensors and there are no others."""
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return error
    return RefusedError(
        f"shapes or branches of the step depend on values, and there are none: {reason_of(error)}",
        fix="pass a model and a batch that are not on the meta device, or a function that builds the model",
    )


def passes_of(run: Run, batch: Batch, limit: float = inf, casts: bool = True) -> CountedPasses:
    """The passes through a run's model on this batch: built and traced for real unless tensors are fake. What takes
    more than `limit` bytes is counted up to there. See `StepTrace` for `casts`."""
    with one_thread():
        with StepTrace(limit=limit, casts=casts) as built:
            model = run.build_model()
        return CountedPasses(model, run.objective, run.backward, batch, built)


def on_fakes(run: Run, fake: FakeTensorMode) -> Run:
    """The run with its model on fake tensors."""
    return replace(run, plain=plain_on_fakes(run.plain, fake), device=CPU)


def plain_on_fakes(plain: BaseRun, fake: FakeTensorMode) -> BaseRun:
    """The run without techniques with its model on fake tensors."""

    def build() -> nn.Module:
        model: nn.Module | None = None
        with (
            suppress(Exception),
            fake,
            _FakeCopies(),
        ):  # whoever builds it may read values; what is really wrong shows again
            model = plain.build()
        if model is None:
            gc.collect()  # what was built of it is in cycles with the error
            with suppress(Exception), unset_fake_temporarily(), torch.device("meta"):
                model = plain.build()
        if model is None:
            with unset_fake_temporarily(), untraced():  # what it is copied from is no part of the step
                model = plain.build()
        with fake:
            return _faked(model, fake)

    return replace(plain, build=build)


def trained_batch_norms(plain: BaseRun) -> list[str]:
    """Return the names of layers that normalize by the statistics of a batch while the model trains."""
    with preserved_draws(), without_log():
        return batch_norms(plain_on_fakes(plain, FakeTensorMode(allow_non_fake_inputs=True)).build().train())


class _FakeCopies(TorchFunctionMode):
    """Fake tensors where `copy.deepcopy` copies any. torch's own copies give a fake tensor the storage of another and
    copy the value that it remembers, and the process may crash when they are freed (torch 2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, copies = args
        if id(tensor) not in copies:
            made = torch.empty_like(tensor, requires_grad=tensor.requires_grad)
            made = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
            copies[id(tensor)] = made
            own = {name: value for name, value in vars(tensor).items() if name not in vars(made)}
            vars(made).update(copy.deepcopy(own, copies))
        return copies[id(tensor)]


def _faked(model: nn.Module, fake: FakeTensorMode) -> nn.Module:
    """The model with fake tensors wherever loading weights from a file has left real ones."""
    converted: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _is_to_be_faked(parameter):
                if id(parameter) not in converted:
                    converted[id(parameter)] = nn.Parameter(_fake_of(parameter.detach(), fake), parameter.requires_grad)
                module._parameters[name] = converted[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and _is_to_be_faked(buffer):
                module._buffers[name] = _fake_of(buffer, fake)
    return model


def _is_to_be_faked(tensor: Tensor) -> bool:
    return not hasattr(tensor, "fake_mode") or tensor.device.type == "meta"


def _fake_of(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """Make a fake tensor in the place of another; one without a device is on the processor."""
    if hasattr(tensor, "fake_mode") or tensor.device.type == "meta":
        return torch.empty_like(tensor, device="cpu")
    return fake.from_tensor(tensor)


def touched_modules(run: Run) -> dict[str, list[str]]:
    """What each technique's surgery touches and skips, found on fake tensors. Raises RefusedError where one refuses."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        trial = replace(on_fakes(run, fake), notes={})
        trial.build_model()
    return trial.notes


@dataclass(frozen=True)
class ResidentBytes:
    """Bytes that a rank keeps from step to step, and what techniques' surgery touched on it."""

    parameters: int
    gradients: int
    optimizer: int
    notes: Mapping[str, Sequence[str]]


def resident_bytes(run: Run) -> ResidentBytes:
    """What this rank of a mesh holds with all techniques, found on fake tensors. Raises RefusedError where one refuses.

    Techniques work outside of the fake mode, in which torch cannot tell the places of a mesh: what they make from
    nothing, such as an adapter, is made.
    """
    trial = replace(on_fakes(run, FakeTensorMode(allow_non_fake_inputs=True)), notes={})
    model = trial.build_model()
    optimizer = TransformOptimizer(model.named_parameters(), trial.transform())
    state = [tensor for tensors in optimizer.slots.values() for tensor in tensors]
    kept = ([*model.parameters()], optimizer.parameters, state)
    return ResidentBytes(*(sum(map(tensor_bytes, local_tensors(tensors))) for tensors in kept), trial.notes)
