"""The chunked cross-entropy where each rank of a group has the head's rows for a part of the vocabulary.

Paper: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3. A rank makes the logits of its own part alone.
All that ranks tell each other are two numbers for each token, the log-sum-exp of a part and the logit of the target
where it lies in that part; and in the backward pass the sum of the gradients at the hidden states.

Everything else is that of `chunked_cross_entropy.py`: chunks of tokens, gradients left in the forward pass for the
expected weights. What is by the book, `linear_cross_entropy_reference`, serves here too: with the whole head.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce

from thrifty.kernels import chunked_cross_entropy
from thrifty.kernels.chunked_cross_entropy import IGNORED, chunk_gradients
from thrifty.kernels.functional_collectives import all_gather_single

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Group = dist.ProcessGroup


def vocabulary_step(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    soft: Tensor | None,
    hard: Tensor | None,
    *wanted: bool,
    first: int,
    count: int,
    group: Group,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """`chunk_step` for weight (w, d) and bias (w,) of `count` tokens from `first` on, and impossible ones. Losses and
    lse are those of the whole vocabulary; the gradient of hidden is this part's, to be summed over the group."""
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    own = targets - first
    lse, of_target = _over_vocabulary(logits, own, count, group)
    kept = targets != IGNORED
    losses, masked_lse = torch.where(kept, lse - of_target, 0.0), torch.where(kept, lse, 0.0)
    if soft is None or hard is None:
        return losses, masked_lse, None, None, None
    return losses, masked_lse, *chunk_gradients(logits, lse, hidden, weight, own, soft, hard, *wanted)


def _over_vocabulary(logits: Tensor, own: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """The log-sum-exp over the whole vocabulary, and the logit of the target, (c,) each, from the logits (c, w) of a
    part of `count` tokens and the targets counted from its first token."""
    here = (own >= 0) & (own < count)
    picked = logits.gather(1, own.clamp(0, count - 1)[:, None]).squeeze(1)
    told = torch.stack((logits.logsumexp(-1), torch.where(here, picked, 0.0)))
    of_parts = all_gather_single(told, 0, group).view(-1, *told.shape)
    return of_parts[:, 0].logsumexp(0), of_parts[:, 1].sum(0)


def linear_cross_entropy(
    hidden: Tensor,
    weight: "DTensor",
    targets: Tensor,
    expected: Tensor | None = None,
    *,
    bias: "DTensor | None" = None,
    chunk: int = 512,
) -> tuple[Tensor, Tensor]:
    """`chunked_cross_entropy.linear_cross_entropy` for a head divided along the vocabulary over a mesh of one axis. All
    ranks come here with the same hidden states, targets and weights, and get the same losses."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    step = partial(
        vocabulary_step, first=_first(weight), count=len(weight.to_local()), group=weight.device_mesh.get_group()
    )
    return chunked_cross_entropy.linear_cross_entropy(
        whole.to_local(grad_placements=[Partial()]),
        weight.to_local(),
        targets,
        expected,
        bias=None if bias is None else bias.to_local(),
        chunk=chunk,
        step=step,
    )


@torch.no_grad()
def gradient_norm_scores(
    hidden: Tensor, weight: "DTensor", targets: Tensor, *, bias: "DTensor | None" = None, chunk: int = 512
) -> Tensor:
    """`chunked_cross_entropy.gradient_norm_scores` for such a head."""
    group, first = weight.device_mesh.get_group(), _first(weight)
    here = weight.to_local().to(hidden.dtype)
    here_bias = None if bias is None else bias.to_local().to(hidden.dtype)
    scores = []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = F.linear(part, here, here_bias).to(torch.promote_types(hidden.dtype, torch.float32))
        lse, of_target = _over_vocabulary(logits, target - first, len(here), group)
        share = (of_target - lse).exp()
        squares = all_reduce((logits - lse[:, None]).exp().square().sum(-1), "sum", group)
        # all squares but the target's, and that of 1 - share in its place
        scores.append(torch.where(target != IGNORED, squares - share.square() + (1 - share).square(), 0.0))
    return torch.cat(scores)


def _first(weight: "DTensor") -> int:
    """The first token of this rank's part."""
    (chunk,) = weight.__create_chunk_list__()
    return chunk.offsets[0]
