"""Progressive stacking (Gong et al. 2019): train a shallow model, then duplicate its blocks.

Paper       Gong et al. 2019, Efficient Training of BERT by Progressively Stacking (ICML). Kaddour et al. 2023, No Train
            No Gain (arXiv 2307.06440), doubles the depth at 12.5 % and 30 % of the run.
Promise     Early steps are cheaper. With `start=zeroed`, growth preserves the model's function within 1e-6.
Use         run = thrifty.train(recipe="vit-digits", techniques=["growth.stacking"], budget="2000 steps")
Start with  `stacking:at=[0.125,0.3],start=zeroed`. Set `order=AABBCC` to insert the copy of each block after its
            original.
Cost        With `compile` the model is compiled once per depth. The optimizer state is reset at each growth by default.
Avoid       Long runs, because No Train No Gain reports no gain over a baseline with a decayed learning rate.
Does not    Reset the learning rate schedule, or start from a trained model.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from thrifty.core.claims import Claim
from thrifty.core.errors import IntegrityError
from thrifty.core.run_relative_settings import MovingMoment
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState
from thrifty.core.structural_change import Moments, StructuralChange, same_value
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.residual_branches import find_branches
from thrifty.modeling.residual_checks import refuse_normed_sums
from thrifty.techniques.growth._depth_growth import DepthMapping, Order, cut_stacks


def written_by(model: nn.Module) -> set[tuple[str, str]]:
    """Return the weights and biases of the output layers of residual branches, each as (stack, name inside a block)."""
    written: set[tuple[str, str]] = set()
    for stack, blocks in find_branches(model, ends_only=True).items():
        for branch in blocks[0]:
            path = branch.name.removeprefix(f"{stack}.").partition(".")[2]
            written |= {(stack, f"{path}.{name}") for name in branch.last_parameters}
    return written


class ProgressiveStacking(Technique):
    """In the order ABCABC, block l of the old model (n blocks) initializes blocks l and l + n of the new model. In the
    order AABBCC, block l initializes blocks 2 l and 2 l + 1. With `start=zeroed` the added blocks initially add zero to
    the residual stream.

    `moments` resets the optimizer state after a growth ("reset", as in the paper) or copies it with the block ("copy").
    With "mean" the copied second moments are replaced by their mean over the layer. Moments are never zeroed without a
    reset of the step count. Otherwise the first update would be (1 - beta1) / sqrt(1 - beta2) = 3.16 times as large as
    a step of Adam.
    """

    stage, numerics = Stage.GROW, Numerics.DIFFERENT
    claims = frozenset({Claim.DEPTH})
    clashes: ClassVar[Mapping[Claim, str]] = {Claim.TRAINED_START: "a run starts with the first blocks only"}

    at: tuple[MovingMoment, ...] = (0.125, 0.3)
    """Steps that double the depth of each stack."""
    order: Order = "ABCABC"
    """Order of the copies: repeat the whole stack ("ABCABC"), or repeat each block ("AABBCC")."""
    start: Literal["copy", "zeroed"] = "copy"
    """Initial values of added blocks: copies, or copies with zeros in the output layers of residual branches."""
    moments: Moments = "reset"
    """Optimizer state after a growth: reset, copied ("copy"), or copied with second moments of added blocks replaced by
    their mean over each layer ("mean")."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start == "zeroed":
            refused = {
                Claim.FROZEN_BASE_WEIGHTS: "frozen blocks that start with zeros would never contribute",
                Claim.SHARED_PARAMETERS: "shared parameters cannot be zero in some blocks only",
            }
            object.__setattr__(self, "clashes", refused)

    def changes(self, step: int, state: TrainState) -> StructuralChange | None:
        decided = state.logged_decision(self.name, step)
        if decided is None and step != 0 and step not in self.at:
            return None
        divisor = decided["depth_divisor"] if decided else 2 ** sum(1 for moment in self.at if moment > step)
        reason = "start shallow" if step == 0 else "duplicate the blocks"
        mapping = DepthMapping(state, self.order)
        return StructuralChange(
            reason,
            {"depth_divisor": divisor},
            restructure=lambda model: self.cut(model, divisor),
            origin=mapping.origin,
            added=mapping.adds,
            value=_ZeroedBlocks(mapping) if self.start == "zeroed" else same_value,
            moments=self.moments,
        )

    def cut(self, model: nn.Module, divisor: int) -> nn.Module:
        if self.start == "zeroed":
            refuse_normed_sums(model, "added blocks cannot start as the identity")
        cut_stacks(model, lambda blocks: blocks // divisor)
        return model

    def holds(self, state: TrainState) -> None:
        divisors = [entry.decision["depth_divisor"] for entry in state.log if entry.technique == self.name]
        if not divisors:
            raise IntegrityError(f"{self.name}: the run's log has no depth")


class _ZeroedBlocks:
    """Initial values of added blocks, with zeros in the output layers of residual branches. Gains are copied, because a
    gain of zero after a layer of zeros would never train."""

    def __init__(self, mapping: DepthMapping):
        self.mapping = mapping

    def __call__(self, parameter: str, value: Tensor) -> Tensor:
        position = self.mapping.locate(parameter)
        if position is None or not self.mapping.adds(parameter):
            return value
        return torch.zeros_like(value) if (position.stack, position.path) in self._written else value

    @cached_property
    def _written(self) -> set[tuple[str, str]]:
        assert self.mapping.state.model is not None
        return written_by(self.mapping.state.model)
