"""SkipInit (De and Smith 2020): multiply each residual branch by a learned scalar that starts at or near zero.

Paper       De and Smith 2020, Batch Normalization Biases Residual Blocks Towards the Identity Function in Deep Networks
            (arXiv 2002.10444), section 4.
Promise     One scalar per branch keeps the branches of a deep network small at first, as norms do. Norms and warm-up
            are not needed.
Use         model = thrifty.apply(model, "skip_init")
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `skip_init` with dropout, because the removed norms also regularize.
Cost        One scalar per branch. Norms are not computed.
Avoid       Pretrained weights, because blocks that start near the identity lose their pretrained function.
Does not    Keep the plain architecture, or export the trained model as a plain model.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Rate
from thrifty.modeling.embeddings import size_stream
from thrifty.modeling.residual_branches import add_gain, depths, find_branches
from thrifty.modeling.residual_checks import refuse_other_paths
from thrifty.modeling.stream_norms import NormFreeTechnique, bypass_norms


def largest_start(branches: int) -> float:
    """Return the largest allowed initial value, 1 / sqrt(branches).

    Up to this value, the sum of all branches is at most as large as the residual stream.
    """
    return 1 / math.sqrt(branches)


class SkipInit(NormFreeTechnique):
    """An initial value above 1 / sqrt(branches of a stack) is refused, because the paper's analysis does not allow it.
    A block of the paper has one branch; a Transformer's block has two or three. The paper adds dropout, since norms
    also regularize. The scalars have no weight decay. Embeddings are multiplied so that the residual stream starts with
    a root mean square of 1, as after a norm. Norms of queries and keys, and norms in the head, are not removed."""

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "its scalars would keep their small initial values",
        Claim.TRAINED_START: "each block would start near the identity",
    }

    initial_value: Rate = 0.0
    """Initial value of every scalar, at most 1 / sqrt(branches of a stack)."""
    multiplier: Rate = 0.0
    """Factor of all embeddings; with 0, the residual stream starts with a root mean square of 1."""
    where: str = ""
    """Pattern in the names of the output layers of residual branches; by default these layers are detected."""

    def model(self, model: nn.Module) -> nn.Module:
        refuse_other_paths(model, self.where)
        count = 0
        stacks = find_branches(model, self.where, ends_only=True)
        for stack, depth in depths(model, stacks).items():
            branches = sum(map(len, stacks[stack])) * depth // len(stacks[stack])
            if self.initial_value > largest_start(branches):
                rounded = math.floor(1000 * largest_start(branches)) / 1000
                raise RefusedError(
                    f"initial_value '{self.initial_value:g}' exceeds 1 / sqrt({branches} branches)",
                    fix=f"--set techniques.{self.name}.initial_value={rounded:g} or less",
                )
            for branch in (branch for block in stacks[stack] for branch in block):
                start = torch.full((1,), self.initial_value, device=branch.device)
                add_gain(branch.writer, nn.Parameter(start))
                count += 1
        add_note(f"{count} scalars start at {self.initial_value:g}")
        size_stream(model, self.multiplier)
        bypass_norms(model)
        return model
