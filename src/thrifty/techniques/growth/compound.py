"""CompoundGrow (Gu et al. 2021): grow depth, feed-forward width and text length during training.

Paper       Gu et al. 2021, On the Transformer Growth for Progressive BERT Training (arXiv 2010.12562). Width doubles as
            in Net2Net (Chen et al. 2016, arXiv 1511.05641).
Promise     Early steps are cheaper in depth, width and length. Growth in width preserves the function within 1e-6;
            growth in depth and length does not.
Use         run = thrifty.train("llama-nano", "my.txt", techniques=["growth.compound"], budget="2000 steps")
Start with  `compound:depth=4,width=2,length=2`. Set `length=1` for images.
Cost        With `compile` the model is compiled once per structure and text length.
Avoid       Long runs, because the gain of stacking, a part of CompoundGrow, shrinks with the budget.
Does not    Work in your own training loop, or start from a trained model.
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
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.setting_bounds import Positive, Rate
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import Moments, StructuralChange
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.text_lengths import refuse_lost_labels, text_length, truncate_texts, whole_batch
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
    """Return the divisor of a size at a step: min(first, 2^n), where n growths of `at` are still to come."""
    return min(first, 2 ** sum(1 for moment in at if moment > step))


class CompoundGrowth(Technique):
    """Depth grows by stacking. Length grows by truncation (`shorten=truncate`) or by pooled embeddings
    (`shorten=pool`). In width, new units copy old units, and the outgoing weights are divided among the copies. Copies
    with equal weights stay equal with any optimizer. So noise that sums to zero makes the copies differ (`spread`).

    "truncate" shortens the texts. "pool" replaces groups of neighboring embeddings by their mean in training, and
    predicts the token after each group. Evaluation and an early export then run on single tokens, on which the model
    was not trained. The paper finds pooling better than truncation.

    Differs from the paper: the paper widens feed-forward networks by sharing weights.
    """

    stage, numerics = Stage.GROW, Numerics.DIFFERENT
    claims = frozenset({Claim.DEPTH, Claim.WIDTH, Claim.SEQUENCE_LENGTH})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "it copies weights that adapters keep frozen",
        Claim.TRAINED_START: "a run starts with the smallest model",
        Claim.WEIGHT_MASKS: "the density of a mask depends on the shape of its layer, which changes",
        Claim.SHARED_PARAMETERS: "shared parameters do not belong to the units of one block",
    }

    at: tuple[MovingMoment, ...] = (0.125, 0.3)
    """Steps at which the model grows."""
    depth: Positive = 4
    """Initial divisor of the depth, at most 2^n for n growths. The last growths halve the divisor to 1."""
    width: Positive = 2
    """Initial divisor of the feed-forward width, halved like `depth`."""
    length: Positive = 2
    """Initial divisor of the text length, halved like `depth`."""
    shorten: Literal["truncate", "pool"] = "truncate"
    """Truncate texts, or pool neighboring embeddings."""
    spread: Rate = 0.1
    """Standard deviation of the noise in outgoing weights of copied units, relative to their standard deviation."""
    moments: Moments = "reset"
    """Optimizer state after a growth: reset, copied ("copy"), or copied with second moments of added blocks replaced by
    their mean over each layer ("mean")."""
    seed: int = 0

    def batches(self, source: BatchSource) -> BatchSource:
        if self.length == 1 or self.shorten == "pool":
            return source

        def shorten(step: int, batch: Batch) -> Batch:
            divisor = divisor_at(step, self.length, self.at)
            if divisor == 1:
                return batch
            keep = f"--set techniques.{self.name}.length=1"
            whole = whole_batch(source, step, batch)
            length = max(text_length(whole, self.name, keep) // divisor, 1)
            refuse_lost_labels(whole, length, self.name, lambda least: keep)
            return truncate_texts(batch, length)

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
        depth, width = DepthMapping(state), _WiderValues(self, state)
        return StructuralChange(
            "start small" if step == 0 else "grow in depth, width and length",
            decided,
            restructure=lambda model: self.small(model, decided),
            origin=depth.origin,
            resize=width.resize,
            value=width.value,
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
            raise IntegrityError(f"{self.name}: the run's log has no growth decision")


class _WiderValues:
    """Parameter values and optimizer state of a wider model, computed from the current model."""

    def __init__(self, settings: CompoundGrowth, state: TrainState):
        self.settings, self.mapping = settings, DepthMapping(state)

    def resize(self, parameter: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Return `value` with its units duplicated along one dim, so that it has shape `shape`."""
        layer = parameter.rpartition(".")[0]
        inner = next((own for place, own in self._parameters.items() if self._owns(layer, *place)), None)
        grown = [dim for dim, pair in enumerate(zip(value.shape, shape, strict=False)) if pair[0] != pair[1]]
        is_plain = inner is not None and len(grown) == 1 and value.ndim == len(shape)
        if not is_plain or value.shape[grown[0]] != inner.units * inner.parts:
            raise RefusedError(
                f"optimizer state of shape {tuple(value.shape)} for {parameter} has no dim of "
                f"{inner.units if inner else 'any'} inner units, so it cannot grow to {tuple(shape)}",
                fix=f'--set techniques.{self.settings.name}.moments="reset"; or width=1',
            )
        return duplicate_units(value, grown[0], shape[grown[0]], inner.parts)

    def value(self, parameter: str, value: Tensor) -> Tensor:
        position = self.mapping.locate(parameter)
        inner = self._parameters.get((position.stack, position.path)) if position else None
        if inner is None or not inner.writes or value.shape[inner.dim] == inner.units:
            return value
        return divide_outputs(value, inner.dim, inner.units, self.settings.spread, f"{self.settings.seed}/{parameter}")

    def _owns(self, layer: str, stack: str, name: str) -> bool:
        """Return True if the parameter `name` of a block of `stack` belongs to `layer`, a name inside the model."""
        position = self.mapping.locate(f"{layer}.")
        return position is not None and (position.stack, position.path) == (stack, f"{name.rpartition('.')[0]}.")

    @cached_property
    def _parameters(self) -> dict[tuple[str, str], InnerUnits]:
        assert self.mapping.state.model is not None
        return inner_parameters(self.mapping.state.model)
