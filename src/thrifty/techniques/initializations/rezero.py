"""ReZero (Bachlechner et al. 2021): start each block as the identity and scale its branches by a learned scalar.

Paper       Bachlechner et al. 2021, ReZero is All You Need (arXiv 2003.04887), equation 1 and section 5.
Promise     A block computes x + α F(x). Because α starts at 0, signals and gradients pass unchanged at any depth,
            without norms and warm-up.
Use         model = thrifty.apply(model, "rezero")
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `rezero`, without a warm-up. `shared=branch` trains one α per branch instead of one per block.
Cost        One scalar per block. Norms are not computed.
Avoid       Pretrained weights, because blocks that start as the identity lose their pretrained function.
Does not    Keep the plain architecture, or export the trained model as a plain model.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import nn

from thrifty.core.claims import Claim
from thrifty.core.run_notes import add_note
from thrifty.core.setting_bounds import Rate
from thrifty.modeling.embeddings import size_stream
from thrifty.modeling.residual_branches import ResidualBranch, add_gain, find_branches
from thrifty.modeling.residual_checks import refuse_other_paths
from thrifty.modeling.stream_norms import NormFreeTechnique, bypass_norms


def alphas(branches: Sequence[ResidualBranch], shared: Literal["block", "branch"]) -> list[nn.Parameter]:
    """Return the residual weight α (1,), initially 0, of each branch. All branches of a block may share one α."""

    zeros = [nn.Parameter(torch.zeros(1, device=branch.device)) for branch in branches]
    return zeros[:1] * len(branches) if shared == "block" else zeros


class ReZero(NormFreeTechnique):
    """The branches of a block share one residual weight α, as in the authors' code. At step 0 only the scalars α, the
    embedding and the head have nonzero gradients. The scalars have no weight decay. Branches keep the model's own
    initialization. Embeddings are multiplied so that the residual stream starts with a root mean square of 1, as after
    a norm. Norms of queries and keys, and norms in the head, are not removed."""

    clashes: ClassVar[Mapping[Claim, str]] = {
        Claim.FROZEN_BASE_WEIGHTS: "its α would stay zero, so every block would stay the identity",
        Claim.TRAINED_START: "each block would start as the identity",
    }

    shared: Literal["block", "branch"] = "block"
    """Scope of an α: all branches of a block, or one branch."""
    multiplier: Rate = 0.0
    """Factor of all embeddings; with 0, the residual stream starts with a root mean square of 1."""
    where: str = ""
    """Pattern in the names of the output layers of residual branches; by default these layers are detected."""

    def model(self, model: nn.Module) -> nn.Module:
        refuse_other_paths(model, self.where)
        count = 0
        for blocks in find_branches(model, self.where, ends_only=True).values():
            for branches in blocks:
                for branch, alpha in zip(branches, alphas(branches, self.shared), strict=True):
                    add_gain(branch.writer, alpha)
                count += len(branches) if self.shared == "branch" else 1
        add_note(f"{count} residual weights start at 0")
        size_stream(model, self.multiplier)
        bypass_norms(model)
        return model
