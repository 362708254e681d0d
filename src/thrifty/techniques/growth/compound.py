"""CompoundGrow (Gu et al. 2021): grow depth, feed-forward width and text length during training.

Paper       Gu et al. 2021, On the Transformer Growth for Progressive BERT Training (arXiv 2010.12562). Width is doubled
            as in Net2Net (Chen et al. 2016, arXiv 1511.05641).
Promise     Early steps are cheaper in three dimensions. Growth in width preserves the function within 1e-6; growth in
            depth and length does not.
Use         run = thrifty.train("llama-nano", "my.txt", techniques=["growth.compound"], budget="2000 steps")
Start with  `compound:depth=4,width=2,length=2`. Set `length=1` for images.
Cost        With `compile` each structure and length is compiled once.
Avoid       Long runs: the gain of stacking, one of its parts, shrinks with the budget.
Does not    Work in your own training loop or with the trained weights of a model.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch, BatchSource, MappedSource
from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.objective import Objective
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Positive, Rate
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import Moments, StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.text_lengths import refuse_more_than_tokens, truncate_texts
from thrifty.techniques.growth._depth_growth import DepthMapping, cut_stacks
from thrifty.techniques.growth._token_pooling import PooledObjective, add_pooling
from thrifty.techniques.growth._width_growth import (
    InnerUnits,
    divide_outputs,
    duplicate_units,
    inner_parameters,
    narrow_networks,
)


def divisor_at(step: int, first: int, at: tuple[int | float, ...]) -> int:
    """By what a size is divided at this step: `first` to begin with, at most 2 before the last growth, 4 before the one
    before it, and so on."""
    return min(first, 2 ** sum(1 for moment in at if moment > step))


class CompoundGrowth(Technique):
    """Depth grows by stacking and length by truncation, or by pooled embeddings (`shorten=pool`). In width, new units
    copy old ones and their outgoing weights are divided. Copies with equal weights would stay equal with any
    optimizer, so noise that cancels makes them unlike (`spread`).

    "truncate" shortens the texts. "pool" feeds means of neighboring embeddings to the blocks in training, and predicts
    the token after each group. Evaluation, and a model that is exported early, then see single tokens, on which they
    were not trained. The paper finds pooling better.
    """

    stage, numerics = Stage.GROW, Numerics.DIFFERENT
    claims = frozenset({Claim.DEPTH, Claim.WIDTH, Claim.SEQUENCE_LENGTH})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it copies weights that adapters keep frozen",
        Claim.TRAINED_START: "a run starts with the smallest model",
        Claim.WEIGHT_MASKS: "a layer that grows wider would have another density than was promised for its shape",
        Claim.SHARED_PARAMETERS: "what blocks share is not made of one block's units",
    }

    at: tuple[StepOrFraction, ...] = (0.125, 0.3)
    """When the model grows."""
    depth: Positive = 4
    """By what depth is divided at first, at most 2 for each growth; halved at each growth once that suffices to end at
    1. 1 leaves it alone."""
    width: Positive = 2
    """The same for the inner units of feed-forward networks."""
    length: Positive = 2
    """The same for the length of texts."""
    shorten: Literal["truncate", "pool"] = "truncate"
    spread: Rate = 0.1
    """How unlike the shares of copied units are, in standard deviations of the weights."""
    moments: Moments = "reset"
    """Whether the optimizer starts afresh after a growth, copies the state of what grew, or copies it with the second
    moments of added blocks at their mean over each layer."""
    seed: int = 0

    def batches(self, source: BatchSource) -> BatchSource:
        if self.length == 1 or self.shorten == "pool":
            return source

        def shorten(step: int, batch: Batch) -> Batch:
            divisor = divisor_at(step, self.length, self.at)
            if divisor == 1:
                return batch
            refuse_more_than_tokens(batch, self.name, "leave the length alone: length=1")
            return truncate_texts(batch, max((batch["tokens"].shape[1] - 1) // divisor, 1))

        return MappedSource(source, shorten)

    def objective(self, objective: Objective) -> Objective:
        return PooledObjective(objective) if self.shorten == "pool" and self.length > 1 else objective

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        decided: Mapping[str, Any] | None = state.logged_decision(self.name, step)
        if decided is None:
            if step != 0 and step not in self.at:
                return None
            firsts = {"depth": self.depth, "width": self.width, "length": self.length}
            decided = {f"{size}_divisor": divisor_at(step, first, self.at) for size, first in firsts.items()}
        taller, wider = DepthMapping(state), _WiderValues(self, state)
        return StructuralChange(
            "start small" if step == 0 else "grow in depth, width and length",
            decided,
            restructure=lambda model: self.small(model, decided),
            origin=taller.origin,
            resize=wider.resize,
            value=wider.value,
            moments=self.moments,
        )

    def small(self, model: nn.Module, decided: Mapping[str, int]) -> nn.Module:
        cut_stacks(model, lambda blocks: blocks // decided["depth_divisor"])
        narrow_networks(model, decided["width_divisor"])
        if self.shorten == "pool" and decided["length_divisor"] > 1:
            add_pooling(model, decided["length_divisor"])
        return model

    def holds(self, state: TrainState) -> None:
        if not any(entry.technique == self.name for entry in state.log):
            raise IntegrityError(f"{self.name}: the run's log does not say how large the model is")


class _WiderValues:
    """Values of a wider model from those of the model that a state has now."""

    def __init__(self, settings: CompoundGrowth, state: TrainState):
        self.settings, self.taller = settings, DepthMapping(state)

    def resize(self, parameter: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Whatever belongs to a layer with inner units and shows them along one dim."""
        layer = parameter.rpartition(".")[0]
        inner = next((own for name, own in self._parameters.items() if self._is_of(layer, name)), None)
        grown = [dim for dim, pair in enumerate(zip(value.shape, shape, strict=False)) if pair[0] != pair[1]]
        is_plain = inner is not None and len(grown) == 1 and value.ndim == len(shape)
        if not is_plain or value.shape[grown[0]] != inner.units * inner.parts:
            raise RefusedError(
                f"what is kept for {parameter} is of shape {tuple(value.shape)}, which does not show "
                f"{inner.units if inner else 'any'} inner units, so it cannot be copied to {tuple(shape)}",
                fix=f'--set techniques.{self.settings.name}.moments="reset", or width=1',
            )
        return duplicate_units(value, grown[0], shape[grown[0]], inner.parts)

    def value(self, parameter: str, value: Tensor) -> Tensor:
        place = self.taller.place(parameter)
        inner = self._parameters.get(place.path) if place else None
        if inner is None or not inner.writes or value.shape[inner.dim] == inner.units:
            return value
        return divide_outputs(value, inner.dim, inner.units, self.settings.spread, f"{self.settings.seed}/{parameter}")

    def _is_of(self, layer: str, name: str) -> bool:
        """Whether a layer of the model, by name, is the one that has a parameter of this name inside its block."""
        place = self.taller.place(f"{layer}.")
        return place is not None and place.path == f"{name.rpartition('.')[0]}."

    @cached_property
    def _parameters(self) -> dict[str, InnerUnits]:
        assert self.taller.state.model is not None
        return inner_parameters(self.taller.state.model)
