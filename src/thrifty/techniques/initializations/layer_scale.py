"""LayerScale: a learned gain per channel on each residual branch, starting small. Norms and warm-up stay.

Paper     Touvron et al. 2021, Going deeper with Image Transformers (arXiv 2103.17239), equation 4.
Promise   deep pre-norm models (36 blocks and more) train where they would stall; nothing at 24 blocks and below in
          our own run of 250 steps.
Note      the start is 0.1 up to depth 18, 1e-5 at 24, 1e-6 deeper, as in the paper; the class default of 1e-4 found in
          several libraries is not the paper's. The gains are never decayed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thrifty.core.stages import Stage
from thrifty.core.surgery import find_blocks, note, select
from thrifty.core.technique import Numerics, Technique


def initial_gain(depth: int) -> float:
    """The paper's start for a model of `depth` blocks (section 3.2)."""
    return 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6


@torch.no_grad()
def fold(model: nn.Module) -> nn.Module:
    """Multiply every gain into the weight and bias before it, and take it off."""
    for module in model.modules():
        if hasattr(module, "gain_hook"):
            module.weight.mul_(module.gain[:, None] if isinstance(module, nn.Linear) else module.gain)
            if module.bias is not None:
                module.bias.mul_(module.gain)
            module.gain_hook.remove()
            del module.gain, module.gain_hook
    return model


def _scale_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * module.gain.to(output.dtype)


@dataclass(frozen=True)
class LayerScale(Technique):
    stage, numerics = Stage.INITIALIZE, Numerics.DIFFERENT
    claims = frozenset({"residual gains"})
    clashes: ClassVar[Mapping[str, str]] = {"frozen base weights": "its gains would stay as small as they start"}

    start: float = 0.0
    """First value of every gain; 0 takes the paper's value for the model's depth."""
    where: str = r"(\.|^)(out|down|out_proj|o_proj|c_proj|down_proj|fc2|dense|dense_4h_to_h)$"
    """Pattern of the modules inside a block that write into the residual stream."""

    def model(self, model: nn.Module) -> nn.Module:
        _, blocks = find_blocks(model)
        start = self.start or initial_gain(len(blocks))
        gains = 0
        for block in blocks:
            for module in select(block, nn.Module, self.where).matched.values():
                # `weight` of a linear layer is (out, in); transformers' Conv1D keeps (in, out)
                width = module.weight.shape[0 if isinstance(module, nn.Linear) else 1]
                module.gain = nn.Parameter(torch.full((width,), start, device=module.weight.device))
                gains += 1
                module.gain_hook = module.register_forward_hook(_scale_output)
        note(f"{gains} branches in {len(blocks)} blocks, gains start at {start:g}")
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        return fold(model)
