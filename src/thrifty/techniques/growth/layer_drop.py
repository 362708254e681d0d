"""Progressive layer dropping (Zhang and He 2020): skip random blocks, more often deep in the model and late in the run.

Paper       Zhang and He 2020, Accelerating Training of Transformer-Based Language Models with Progressive Layer
            Dropping (arXiv 2010.13369), section 4.
Promise     With `theta=0.5` a late step computes (3 L - 1) / 4 of L blocks on average. The branches of kept blocks are
            rescaled, so that their expected output is unchanged.
Use         run = thrifty.train(recipe="vit-digits", techniques=["growth.layer_drop"], budget="2000 steps")
Start with  `layer_drop:theta=0.5`. Raise `theta` if the loss is worse than without layer dropping at equal steps.
Cost        Gradients are noisier than without dropped blocks. A dropped block has zero gradient, but its optimizer
            moments and weight decay continue.
Avoid       Fixed compute budgets, because noisier gradients can cost more than skipped blocks save. Post-norm models
            and models with a norm after each branch (Gemma 2, OLMo 2), which are refused.
Does not    Drop or rescale blocks in evaluation.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.module_notes import ModuleNote
from thrifty.core.objective import Objective
from thrifty.core.randomness import seed_of
from thrifty.core.run_notes import add_note
from thrifty.core.run_relative_settings import StepOrFraction
from thrifty.core.setting_bounds import Fraction
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.module_surgery import change_first
from thrifty.modeling.residual_branches import find_branches
from thrifty.modeling.residual_checks import refuse_normed_branches, refuse_normed_sums
from thrifty.techniques.growth._block_gates import add_gates, gated_blocks, gates


def theta_at(step: int, theta: float, settle: int) -> float:
    """Return theta at a step, (1 - theta) · exp(-step / settle) + theta."""
    return (1 - theta) * math.exp(-step / max(settle, 1)) + theta


def keep_probability(block: int, blocks: int, theta: float, spare_first: bool = False) -> float:
    """Return the probability of keeping a block, 1 - l / L · (1 - theta).

    L is the number of blocks. l is `block` + 1; with `spare_first`, l is `block`.
    """
    return 1 - (block + (not spare_first)) / blocks * (1 - theta)


def is_kept(seed: int, step: int, stack: str, block: int, probability: float) -> bool:
    return seed_of(f"{seed}/{step}/{stack}.{block}") < probability * 2**56


class LayerDropBackward:
    """A backward pass that skips some blocks. `state` counts steps."""

    def __init__(self, inner: Backward, settings: "LayerDrop"):
        self.inner, self.settings = inner, settings
        # readable while only shapes are traced, unlike torch.zeros
        self.state = {"steps": torch.tensor(0)}

    def __call__(self, model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        step, settings = int(self.state["steps"]), self.settings
        self.state["steps"].add_(1)
        theta = theta_at(step, settings.theta, int(settings.time_constant))
        kept = []

        def is_open(stack: str, block: int, blocks: int) -> bool:
            probability = keep_probability(block, blocks, theta, settings.keep_first_block)
            kept.append(is_kept(settings.seed, step, stack, block, probability))
            return kept[-1]

        blocks = gated_blocks(model, settings.name)
        for block, _, index, count in blocks:
            _multiply(block, 1 / keep_probability(index, count, theta, settings.keep_first_block))
        try:
            with gates(model, settings.name, is_open):
                outcome = self.inner(model, objective, batch)
        finally:
            for block, *_ in blocks:
                _multiply(block, None)
        return replace(outcome, notes=outcome.notes | {"kept_blocks": float(sum(kept))})


IS_MULTIPLIED: ModuleNote[bool] = ModuleNote("is_multiplied")


def _multiply(block: nn.Module, factor: float | None) -> None:
    """Multiply the outputs of a block's residual branches by a factor in all later passes; None removes the factor."""
    for writer in block.modules():
        if hasattr(writer, "kept_factor"):
            IS_MULTIPLIED.set(writer, factor is not None)
            if factor is not None:
                writer.kept_factor.fill_(factor)


def _times_factor(writer: nn.Module, args: Any, output: Any) -> Any:
    if not IS_MULTIPLIED.of(writer):
        return output
    return change_first(output, lambda x: x * writer.kept_factor.to(x.dtype))


def add_factor(writer: nn.Module, like: Tensor) -> None:
    """Register the factor of a branch's outputs as a buffer of its output layer `writer`.

    A buffer can change without recompilation.
    """
    writer.register_buffer("kept_factor", torch.ones((), device=like.device), persistent=False)
    IS_MULTIPLIED.set(writer, False)
    writer.register_forward_hook(_times_factor)


class LayerDrop(Technique):
    """Block l of L (counted from 1) is kept with probability p = 1 - l / L · (1 - theta(t)). theta(t) falls from 1 to
    `theta`. The output of each branch of a kept block is multiplied by 1 / p. The decisions of a step depend only on
    (seed, step, block), so all ranks, micro-batches and recomputed passes skip the same blocks. The estimated footprint
    describes a step that keeps all blocks.

    A post-norm block is not the identity if its branches return zero, so post-norm models are refused. A norm after a
    branch would undo the factor 1 / p, so models with such norms are refused too.

    Differs from the published code: that code samples block l with p_l and multiplies by 1 / p_(l+1), which is up to
    1.083 times too large for 12 blocks. DeepSpeed counts blocks from 0 and never drops the first block;
    `keep_first_block` does so here.
    """

    stage, numerics = Stage.ARCHITECTURE, Numerics.DIFFERENT
    claims = frozenset({Claim.DROPPED_BLOCKS})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "a step that drops all blocks would train no parameter",
        Claim.RANK_WIDE_PLAN: "the memory plan of a block is fixed, and a dropped block is not computed",
    }

    theta: Fraction = 0.5
    """Final theta, the fraction of late steps that keep the last block."""
    time_constant: StepOrFraction = 0.01
    """Time constant of theta's decay in steps, 1 / gamma of the paper."""
    keep_first_block: bool = False
    """Count blocks from 0, so that the first block is never dropped."""
    seed: int = 0

    def model(self, model: nn.Module) -> nn.Module:
        refuse_normed_sums(model, "a dropped block would also lose this norm")
        refuse_normed_branches(model, "the norm undoes the factor of kept branches")
        for blocks in find_branches(model, ends_only=True).values():
            for branch in (branch for block in blocks for branch in block):
                add_factor(branch.writer, next(branch.writer.parameters()))
        add_note(f"{len(add_gates(model, self.name))} blocks can be dropped")
        return model

    def backward(self, backward: Backward) -> Backward:
        return LayerDropBackward(backward, self)
