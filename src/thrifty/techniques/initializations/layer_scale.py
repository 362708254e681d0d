"""LayerScale (Touvron et al. 2021): multiply each residual branch by learned per-channel gains that start small.

Paper       Touvron et al. 2021, Going deeper with Image Transformers (arXiv 2103.17239), equation 4.
Promise     Pre-norm models of 36 or more blocks train where they would otherwise stall.
Use         model = thrifty.apply(model, "layer_scale")
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `layer_scale`. The initial gain depends on the depth; `initial_value` overrides the gain.
Cost        One elementwise product per residual branch. After training the gains are folded into the weights.
Avoid       Pretrained weights, because the small initial gains shrink the output of every branch. Models with a norm
            after each branch (Gemma 2, OLMo 2), which are refused.
Does not    Remove the norms or the warm-up, or apply weight decay to the gains.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Rate
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.modeling.expert_stacks import is_expert_stack, scale_outputs
from thrifty.modeling.layer_shapes import is_transposed
from thrifty.modeling.residual_branches import GAIN_HOOK, add_gain, depths, find_branches
from thrifty.modeling.residual_checks import refuse_undone_gains


def initial_gain(depth: int) -> float:
    """Return the paper's initial gain for a model of `depth` blocks (section 3.2)."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Multiply every gain into the weight and bias before the gain, and remove the gain."""
    for _, module in GAIN_HOOK.noted(model):
        last = module.out_proj if isinstance(module, nn.MultiheadAttention) else module
        if is_expert_stack(last):
            scale_outputs(last, module.gain)
        else:
            last.weight.mul_(module.gain if is_transposed(last) else module.gain[:, None])
            if last.bias is not None:
                last.bias.mul_(module.gain)
        GAIN_HOOK.remove(module).remove()
        del module.gain
    return model


class LayerScale(Technique):
    """The initial gain is 0.1 up to 18 blocks, 1e-5 up to 24 and 1e-6 for deeper models, as in the paper (section 3.2).
    The default of several libraries, 1e-4, is not from the paper.

    A norm after a branch would cancel the gains before the norm, because a norm rescales its input.
    """

    stage, numerics = Stage.INITIALIZE, Numerics.DIFFERENT
    claims = frozenset({Claim.RESIDUAL_GAINS})
    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "its gains would keep their small initial values",
        Claim.TRAINED_START: "the output of each branch would shrink to the initial gains",
    }

    initial_value: Rate = 0.0
    """Initial value of every gain; 0 uses the paper's value for the model's depth."""
    where: str = ""
    """Pattern in the names of the output layers of residual branches; by default these layers are detected."""

    def model(self, model: nn.Module) -> nn.Module:
        refuse_undone_gains(model, self.where, "it would undo every gain before it")
        stacks = find_branches(model, self.where, ends_only=True)
        for stack, depth in depths(model, stacks).items():
            blocks, start = stacks[stack], self.initial_value or initial_gain(depth)
            for branch in (branch for branches in blocks for branch in branches):
                add_gain(branch.writer, nn.Parameter(torch.full((branch.width,), start, device=branch.device)))
            add_note(f"{sum(map(len, blocks))} branches in {len(blocks)} blocks, gains start at {start:g}")
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        return fold(model)
