"""`estimate`: will a training step fit, what is its memory made of, and what would make it fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thrifty import techniques as catalogue
from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import explain
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.claims import Claim
from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.plain_values import read_size
from thrifty.core.recipe import ModelSettings, Recipe
from thrifty.core.technique import Numerics, Technique
from thrifty.core.user_objects import UserObjects
from thrifty.interface.own_loop import technique_of
from thrifty.objectives.user_loss import UserLoss, loss_of_output
from thrifty.planning.plan_search import PlanSearch
from thrifty.planning.planner import allowed_options

STEPS = 1000
"""Steps of the run whose step is estimated, for settings that are fractions of one."""


class OneBatch(BatchSource):
    """The same batch at every step."""

    def __init__(self, leaves: Sequence[Tensor]):
        self.leaves, self.batch = leaves, len(leaves[0])

    def rows(self, step: int, start: int, stop: int) -> Batch:
        fields = {str(place): leaf[start:stop] for place, leaf in enumerate(self.leaves)}
        return Batch(fields, torch.full((stop - start,), 1 / self.batch))


@dataclass(frozen=True)
class EstimatedOption:
    """A change that makes a step fit, the peak with it, and the time that a step is expected to take relative to one
    without it."""

    label: str
    techniques: tuple[Technique, ...]
    peak: float
    relative_time: float

    def __str__(self) -> str:
        return f"{self.label}: {self.peak / 1e9:.3g} GB, about {self.relative_time:.2f} of the time of a step"


@dataclass(frozen=True)
class StepEstimate:
    """Predicted bytes and FLOPs of one training step.

    `peak` counts the tensors of one process at the peak of a step; `parts` are what it is made of. On a processor the
    process itself holds more (`thrifty explain` prints it).
    """

    peak: float
    parts: Mapping[str, float]
    flops: float
    """FLOPs of the forward and backward pass of one step, a multiply-add counted as two."""
    parameters: int
    memory: float
    options: tuple[EstimatedOption, ...]
    """Changes with which it fits `memory`, the cheapest first; empty if it fits, or nothing does."""
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory

    def __str__(self) -> str:
        lines = [f"{self.parameters:,} parameters, {self.flops / 1e9:,.3g} GFLOP a step, peak {self.peak / 1e9:.3g} GB"]
        lines += [f"  {name:<12}{value / 1e6:>12,.1f} MB" for name, value in self.parts.items() if value]
        if self.memory < inf:
            lines.append(f"{'fits' if self.fits else 'does not fit'} {self.memory / 1e9:.3g} GB")
        lines += [f"  {option}" for option in self.options]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def estimate(
    model: nn.Module | Callable[[], nn.Module] | str | Path,
    batch: Any = None,
    *,
    loss: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: str | Technique = "adamw",
    techniques: Sequence[str | Technique | type[Technique]] = (),
    memory: str | float | None = None,
    allow: str = "rounding",
    device: str = "cpu",
) -> StepEstimate:
    """StepEstimate the memory and work of a training step; nothing is allocated and no step is run.

    `model` is a module, on the meta device or not, or a function that builds one. `batch` is what `loss(model, batch)`
    takes; without a loss it is keyword arguments of a model that computes its own. `memory` ("24GB" or bytes) is what
    must suffice; `allow` limits the options to those that change no value ("exact"), only roundings ("rounding") or
    anything ("different"). `device` is the type that options are chosen for.

    Raises UsageError for a batch without rows, RefusedError where a technique does not fit the model.

    Example::

        fit = thrifty.estimate(model, batch, loss=loss, memory="24GB")
        print(fit, fit.fits, fit.options)
    """
    if not callable(model):
        raise UsageError(f"{model!r} is no module and no function that builds one", fix="pass the module itself")
    leaves, structure = tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise UsageError("the batch has parts without a row for each example", fix="pass tensors alone")
    leaves = [torch.zeros_like(leaf, device="cpu") if leaf.is_meta else leaf for leaf in leaves]
    chosen = (technique_of(optimizer, {}), *(technique_of(each, {}) for each in techniques))
    if Claim.OPTIMIZER not in chosen[0].claims:
        raise UsageError(f"{chosen[0].name} is no optimizer", fix="optimizer='adamw'")

    def assembled(rows: Batch) -> Any:
        return tree_unflatten([rows[str(place)] for place in range(len(leaves))], structure)

    plain = BaseRun(UserObjects(model).build_model, OneBatch(leaves), UserLoss(loss or loss_of_output, assembled))
    explanation = explain(compose(plain, chosen, STEPS))
    footprint = explanation.footprint
    limit = inf if memory is None else read_size(memory, "memory") if isinstance(memory, str) else float(memory)
    options = () if footprint.memory <= limit else _options(plain, chosen, limit, Numerics(allow), device)
    return StepEstimate(
        footprint.memory,
        _parts(footprint),
        footprint.flops,
        explanation.parameters,
        limit,
        options,
        explanation.decisions,
    )


def _parts(footprint: Footprint) -> dict[str, float]:
    """Return the parts of the peak; gradients appear while activations go, so that the smaller of both is left out."""
    names = ("parameters", "buffers", "optimizer", "gradients", "activations", "temporary")
    parts = {name: getattr(footprint, name) for name in names}
    parts[min("gradients", "activations", key=parts.__getitem__)] = 0.0
    return parts


def _options(
    plain: BaseRun, chosen: tuple[Technique, ...], limit: float, allow: Numerics, device: str
) -> tuple[EstimatedOption, ...]:
    recipe = Recipe(model=ModelSettings(), techniques=chosen)
    known = {name: catalogue.find(name) for name in catalogue.own_names()}
    ways, _ = allowed_options(recipe, plain, known, allow, device)
    search = PlanSearch(plain, recipe.techniques, STEPS, ways, limit, 1.0)
    search.look_at_singles()
    fitting = [way for way, footprint in search.singles.items() if footprint.memory <= limit]
    found = [
        EstimatedOption(way.label, way.techniques, search.alone(way).memory, search.relative(way)) for way in fitting
    ]
    found = [option for option in found if option.peak <= limit]
    if not found:
        try:
            best = search.run()
        except InfeasibleError:
            return ()
        new = tuple(each for each in best.techniques if each not in recipe.techniques)
        found = [EstimatedOption(best.label, new, best.tensors, best.relative)]
    return tuple(sorted(found, key=lambda option: option.relative_time))
