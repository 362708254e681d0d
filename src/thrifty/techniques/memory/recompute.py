"""Recompute: keep only the input of each block, run its forward pass again in the backward pass.

Paper     Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174), section 3.
Promise   activation memory of one block instead of all, about one third more compute.
Does not  change any value, dropout included (numerics: exact); rename any parameter.
Avoid     when the model already fits: then it only costs time.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from thrifty.core.bounds import Positive
from thrifty.core.stages import Stage
from thrifty.core.surgery import find_stacks, note, wrap_forward
from thrifty.core.technique import Numerics, Technique


def run_again(module: nn.Module, inner: Any, *args: Any, **kwargs: Any) -> Any:
    """A forward pass whose intermediate tensors are dropped and computed again when the backward pass needs them."""
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


@dataclass(frozen=True)
class Recompute(Technique):
    stage, numerics = Stage.RECOMPUTE, Numerics.EXACT

    every: Positive = 1
    """Recompute every k-th block of each stack: 1 is all of them, 2 every other one."""

    def model(self, model: nn.Module) -> nn.Module:
        for name, blocks in find_stacks(model).items():
            for block in list(blocks)[:: self.every]:
                wrap_forward(block, run_again)
            note(f"{len(blocks[:: self.every])} of {len(blocks)} blocks in {name or 'the model'}")
        return model
