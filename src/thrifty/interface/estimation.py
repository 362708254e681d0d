"""`estimate`: predict the memory of a training step, and list changes that make the step fit."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Literal

import torch
from rich.console import RenderableType
from torch import Tensor, nn
from torch.optim import Optimizer

from thrifty import techniques as catalogue
from thrifty.composition.compose import compose
from thrifty.composition.explain import explain
from thrifty.composition.index_check import refuse_indices_without_row
from thrifty.composition.technique_optimizer import TechniqueOptimizer
from thrifty.composition.torch_update import AppliedUpdates, TorchOptimizer
from thrifty.core.claims import Claim
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError, reason_of
from thrifty.core.footprint import Footprint
from thrifty.core.plain_values import read_size, write_size
from thrifty.core.recipe import ModelSettings, Recipe
from thrifty.core.technique import Numerics, Technique
from thrifty.core.tensor_tracing import gc_frozen
from thrifty.interface.estimated_run import EstimatedRun, estimated_run
from thrifty.interface.own_loop import technique_of
from thrifty.interface.recipe_arguments import Function
from thrifty.machine.cpu_features import assume_bfloat16
from thrifty.planning.plan_search import PlanSearch
from thrifty.planning.planner import allowed_options
from thrifty.planning.search_space import MICRO_BATCHES, PlanOption
from thrifty.reporting.number_format import scaled
from thrifty.reporting.printed_result import PrintedResult, lines, open_table
from thrifty.simulators.cluster.device_specs import DEVICES
from thrifty.training.memory_meter import MemoryMeter

STEPS = 1000
"""Assumed number of steps of the run, for settings that are fractions of a run."""
COUNTING = 120.0
"""Time limit in seconds for estimating options. Options that remain at this limit are left out."""
RESERVE = 1.02
"""Safety factor of the predicted peak, because a prediction can be too low. The largest error was 0.02 % for the 90
random models of `results/benchmarks/estimate-cpu.json`.
"""
HELD_LOW, HELD_HIGH, PROCESS_LOW, PROCESS_HIGH = 0.9, 1.15, 0.5, 1.1
"""Bounds of the process memory, as factors of the peak of tensors and of the memory before the step."""
MOVED = 80e6
"""Bytes that a process may hold above the bounds of `HELD_HIGH` and `PROCESS_HIGH`, for freed memory and library
code."""


@dataclass(frozen=True)
class EstimatedOption:
    """A change that makes a step fit: its peak memory, and its expected step time relative to the unchanged step."""

    label: str
    techniques: tuple[Technique, ...]
    peak: float
    relative_time: float
    numerics: str
    """"exact" if the change alters no value, "rounding" if only the last bits, "different" for another algorithm."""


@dataclass(frozen=True, repr=False)
class StepEstimate(PrintedResult):
    """Predicted memory (bytes) and FLOPs of one training step.

    `peak` is the maximum number of bytes of all tensors of one process, including the batch. `parts` lists its
    components.
    """

    peak: float
    parts: Mapping[str, float]
    flops: float
    """FLOPs of the forward and backward pass of one step. A multiply-add counts as two."""
    parameters: int
    memory: float
    """Available bytes: the argument `memory`, or the memory of a named device."""
    options: tuple[EstimatedOption, ...] = ()
    """Changes that make the step fit `memory`, cheapest first. Empty if the step fits, or if no change makes it fit."""
    notes: tuple[str, ...] = ()
    process: tuple[float, float] | None = None
    """Expected bounds, in bytes, of the peak of the whole CPU process with interpreter and libraries. None on a GPU."""

    @property
    def fits(self) -> bool:
        """True if the peak, plus a reserve of 2 %, is at most `memory`."""
        return self.peak * RESERVE <= self.memory

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return 0 if self.fits else InfeasibleError.exit_code

    def as_dict(self) -> dict[str, Any]:
        options = [
            {"change": option.label, "peak": option.peak, "time": option.relative_time, "numerics": option.numerics}
            for option in self.options
        ]
        memory = None if self.memory == inf else self.memory
        return {**vars(self), "parts": dict(self.parts), "memory": memory, "fits": self.fits, "options": options}

    def __rich__(self) -> RenderableType:
        tensors = f"{write_size(self.peak)} of tensors at the peak"
        head = f"{self.parameters:,} parameters, {scaled(self.flops, 'FLOP')} a step, {tensors}"
        parts = [f"  {name:<12}{write_size(value):>12}" for name, value in self.parts.items() if value]
        fit = f"{'fits' if self.fits else 'does not fit'} {write_size(self.memory)}"
        verdict = [] if self.memory == inf else [fit if self.process is None else f"{fit}, without the process"]
        if self.process is not None:
            low, high = map(write_size, self.process)
            verdict.append(f"predicted memory of the process at the peak {low} to {high}")
        if not self.options:
            return lines(head, *parts, *verdict, *self.notes)
        table = open_table("change that makes it fit", "tensors", "time of a step", "numerics")
        for option in self.options:
            table.add_row(option.label, write_size(option.peak), f"{option.relative_time:.2f}", option.numerics)
        return lines(head, *parts, *verdict, *self.notes, table)


def estimate(
    model: Any,
    batch: Any = None,
    *,
    loss: Function | str | None = None,
    optimizer: str | Technique | type | Optimizer = "adamw",
    techniques: Sequence[str | Technique | type[Technique]] = (),
    memory: str | float | None = None,
    allow: Literal["exact", "rounding", "different"] = "different",
    device: str | torch.device = "cpu",
    data: Any = None,
    length: int | None = None,
) -> StepEstimate:
    """Estimate the memory and FLOPs of a training step. No memory is allocated and no step runs.

    Args:
        model: Module (also on the meta device), function that builds a module, preset, `transformers` config, or
            Hugging Face folder. A folder needs only its config.json.
        batch: Argument of `loss(model, batch)`. Without a loss: a dict of keyword arguments of a model that computes
            its own loss. A number is a number of examples.
        data: Dataset, read as in `thrifty.train`. By default examples are random.
        length: Number of tokens per example.
        optimizer: Technique, or class or object of `torch.optim`.
        memory: Available memory: "24GB", "24GiB" or a number of bytes. The default is the memory of a named `device`,
            such as "h100".
        allow: Largest change of numerical values that an option may make: "exact", "rounding" or "different".

    If shapes depend on values, the model runs once on the batch, and a note reports this. On a CPU, convolutions run
    once on a few examples to measure their workspace.

    Raises UsageError if arguments do not fit together or the model raises on the batch, and RefusedError if a technique
    does not support the model.

    Example::

        fit = thrifty.estimate(model, batch, loss=loss, memory="24GB")
        print(fit, fit.fits, fit.options)
    """
    place, own_memory, is_fast = _device(device)
    kind = place.type
    numerics = _numerics(allow)
    limit = own_memory if memory is None else _bytes(memory)
    chosen = (*_optimizer(optimizer, model, kind), *(technique_of(each, {}) for each in techniques))
    run = estimated_run(model, batch, loss, data, length)
    options: tuple[EstimatedOption, ...] = ()
    late = ""
    with gc_frozen(), _assumed(is_fast):
        with _own_errors(run):
            refuse_indices_without_row(run.plain, [run.plain.source.at(0)])
            explanation = explain(compose(run.plain, chosen, STEPS, place))
        footprint, batch_bytes = explanation.footprint, run.batch_bytes
        peak = footprint.memory + batch_bytes
        if peak * RESERVE > limit:
            options, late = _options(run, chosen, limit / RESERVE, numerics, place)
    return StepEstimate(
        peak,
        {**_parts(footprint), "batch": batch_bytes},
        footprint.flops,
        explanation.parameters,
        limit,
        options,
        (*run.notes, *explanation.decisions, *filter(None, [late])),
        _process(peak, run) if kind == "cpu" else None,
    )


@contextmanager
def _own_errors(run: EstimatedRun) -> Iterator[None]:
    """Convert an exception of a model, a loss or an optimizer to UsageError, with the shapes of the batch."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ThriftyError):
            raise
        batch = run.plain.source.at(0).fields.values()
        shapes = ", ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in batch)
        raise UsageError(
            f"the step does not run on a batch of {shapes}: {reason_of(error)}",
            fix="call loss(model, batch).mean().backward() in your code, and fix the error that it raises",
        ) from error


def _device(device: str | torch.device) -> tuple[torch.device, float, bool | None]:
    """Return the torch device, its memory in bytes (inf if unknown), and True if the device has fast bfloat16 (None:
    detect)."""
    word = str(device).lower().removeprefix("nvidia ").partition(" ")[0]
    is_here = torch.cuda.is_available()
    if word == "auto":
        word = "cuda" if is_here else "cpu"
    if word.partition(":")[0] in ("cpu", "cuda"):
        return torch.device(word), inf, None if word == "cpu" or is_here else True
    near = [spec for name, spec in DEVICES.items() if name != "cpu" and name.startswith(word)]
    if not near:
        names = ", ".join(name for name in DEVICES if name != "cpu")
        raise UsageError(f"unknown device {str(device)!r}", fix=f'device="cpu", device="cuda", or one of {names}')
    spec = min(near, key=lambda spec: spec.memory)
    return torch.device("cuda"), spec.memory, spec.has_fast_bfloat16


def _assumed(units: bool | None) -> AbstractContextManager[None]:
    return nullcontext() if units is None else assume_bfloat16(units)


def _numerics(allow: str) -> Numerics:
    try:
        return Numerics(allow)
    except ValueError:
        raise UsageError(f"allow={allow!r} is unknown", fix='allow="exact", "rounding" or "different"') from None


def _bytes(memory: str | float) -> float:
    if isinstance(memory, str):
        return read_size(memory, "memory")
    if not memory > 0:
        raise UsageError(f"memory={memory!r} is not a size", fix='memory="24GB", or a number of bytes')
    return float(memory)


def _optimizer(optimizer: Any, model: Any, kind: str) -> list[Technique]:
    """Return the technique of an optimizer, and the updates that were applied to it."""
    if isinstance(optimizer, TechniqueOptimizer):
        known = optimizer.technique.__dataclass_fields__
        settings = {name: value for name, value in optimizer.param_groups[0].items() if name in known}
        changed = [each for each in optimizer.added if {"model"} - each.optional_seams and each.overrides("model")]
        others = [each for each in optimizer.added if each not in changed]
        updates = [AppliedUpdates(applied=tuple(changed))] if changed else []
        return [optimizer.technique(**settings), *others, *updates]
    if isinstance(optimizer, Optimizer) or (inspect.isclass(optimizer) and issubclass(optimizer, Optimizer)):
        if technique := getattr(optimizer, "technique", None):  # a class of thrifty.optim
            return [technique_of(technique, {})]
        return [TorchOptimizer(make=partial(_torch_optimizer, optimizer, _own_names(optimizer, model), kind))]
    chosen = technique_of(optimizer, {})
    if Claim.OPTIMIZER not in chosen.claims:
        raise UsageError(f"{chosen.name} is not an optimizer", fix="optimizer='adamw', or a class of torch.optim")
    return [chosen]


def _own_names(optimizer: Any, model: Any) -> list[set[str]] | None:
    """Return the names of the parameters in each parameter group of an optimizer of this model. Return None for one
    group of all parameters.
    """
    if not isinstance(optimizer, Optimizer) or not isinstance(model, nn.Module):
        return None
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [{names.get(id(each), "") for each in group["params"]} for group in optimizer.param_groups]
    return groups if any(any(group) for group in groups) else None


def _torch_optimizer(
    optimizer: Any, groups: list[set[str]] | None, kind: str, names: Sequence[str], parameters: Sequence[Tensor]
) -> Optimizer:
    """Build a torch optimizer for these parameters with the settings of `optimizer`. On a GPU, torch's default updates
    all tensors at once (foreach).
    """
    is_class = inspect.isclass(optimizer)
    defaults = {} if is_class else dict(optimizer.defaults)
    accepted = inspect.signature(optimizer if is_class else type(optimizer)).parameters
    settings = {name: value for name, value in defaults.items() if name in accepted}
    if "lr" in accepted and is_class:
        settings["lr"] = 1e-3
    if "foreach" in accepted and kind == "cuda" and not settings.get("fused") and settings.get("foreach") is None:
        settings["foreach"] = True
    pairs = list(zip(names, parameters, strict=True))
    own = groups or [set(names)]
    members: list[Any] = [{"params": [each for name, each in pairs if name in group]} for group in own]
    return (optimizer if is_class else type(optimizer))([group for group in members if group["params"]], **settings)


def _process(peak: float, run: EstimatedRun) -> tuple[float, float]:
    before = MemoryMeter(torch.device("cpu")).process - run.resident
    return (
        PROCESS_LOW * before + HELD_LOW * peak,
        PROCESS_HIGH * before + HELD_HIGH * peak + MOVED,
    )


def _parts(footprint: Footprint) -> dict[str, float]:
    """Return the parts of the peak. Gradients replace activations in memory, so the smaller part is left out."""
    names = ("parameters", "buffers", "optimizer", "gradients", "activations", "temporary")
    parts = {name: getattr(footprint, name) for name in names}
    parts[min("gradients", "activations", key=parts.__getitem__)] = 0.0
    return parts


def _options(
    run: EstimatedRun, chosen: tuple[Technique, ...], limit: float, allow: Numerics, device: torch.device
) -> tuple[tuple[EstimatedOption, ...], str]:
    """Return the options that fit, and a note if the time limit stopped the search."""
    recipe = Recipe(model=ModelSettings(), techniques=chosen)
    known = {name: catalogue.find(name) for name in catalogue.own_names()}
    ways, _ = allowed_options(recipe, replace(run.plain, is_trained=True), known, allow, device.type)
    room = limit - run.batch_bytes
    search = PlanSearch(
        run.plain, recipe.techniques, STEPS, ways, room, 1.0, device=device, allowance=lambda step: COUNTING
    )
    search.look_at_singles()
    options = [
        EstimatedOption(way.label, way.techniques, search.alone(way).memory, search.relative(way), way.numerics.value)
        for way in _cheapest_of_micro_batches([way for way in search.singles if search.singles[way].memory <= room])
    ]
    if not options:
        try:
            search.run()
        except InfeasibleError:
            return (), _late(search)
        options = [
            EstimatedOption(
                each.label,
                tuple(t for t in each.techniques if t not in recipe.techniques),
                each.tensors,
                each.relative,
                max((way.numerics for way in each.options), key=[*Numerics].index).value,
            )
            for each in search.tried
        ]
    fitting = [replace(option, peak=option.peak + run.batch_bytes) for option in options if option.peak <= room]
    return tuple(sorted(fitting, key=lambda option: option.relative_time)), _late(search)


def _cheapest_of_micro_batches(ways: Sequence[PlanOption]) -> list[PlanOption]:
    """Drop options that use more micro-batches than necessary."""
    parts = [way.parts for way in ways if way.axis == MICRO_BATCHES]
    return [way for way in ways if way.axis != MICRO_BATCHES or way.parts == min(parts)]


def _late(search: PlanSearch) -> str:
    return (
        f"time limit: options were estimated for {search.seconds_taken:.0f} s, and {search.stopped} were skipped"
        if search.stopped
        else ""
    )
