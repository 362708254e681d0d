"""Vocabulary-parallel chunked cross-entropy: each rank of a group has the head's rows for a part of the vocabulary.

Paper: Shoeybi et al. 2019, Megatron-LM (arXiv 1909.08053), section 3. A rank computes only the logits of its own part.
Ranks exchange two values per token: the log-sum-exp of each part, and the logit of the target from the part that
contains it. In the backward pass, ranks all-reduce the gradients of the hidden states.

The rest is as in `chunked_cross_entropy.py`: chunks of tokens, and gradients for the expected weights in the forward
pass. The reference is `linear_cross_entropy_reference` with the whole head.
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
    """Run `chunk_step` for weight (w, d) and bias (w,) of the `count` vocabulary tokens that start at `first`. Rows
    after `count` are padding.

    Losses and lse cover the whole vocabulary. The gradient of hidden covers only this part; the caller sums it over the
    group.
    """
    logits = F.linear(hidden, weight, bias).to(torch.promote_types(hidden.dtype, torch.float32))
    own = targets - first
    lse, target_logit = _over_vocabulary(logits, own, count, group)
    counted = targets != IGNORED
    losses, masked_lse = torch.where(counted, lse - target_logit, 0.0), torch.where(counted, lse, 0.0)
    if soft is None or hard is None:
        return losses, masked_lse, None, None, None
    return losses, masked_lse, *chunk_gradients(logits, lse, hidden, weight, own, soft, hard, *wanted)


def _over_vocabulary(logits: Tensor, own: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over the whole vocabulary (c,), and the logit of the target (c,).

    The logits (c, w) belong to a part of `count` tokens. Targets are counted from the part's first token.
    """
    here = (own >= 0) & (own < count)
    picked = logits.gather(1, own.clamp(0, count - 1)[:, None]).squeeze(1)
    values = torch.stack((logits.logsumexp(-1), torch.where(here, picked, 0.0)))
    parts = all_gather_single(values, 0, group).view(-1, *values.shape)
    return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)


def linear_cross_entropy(
    hidden: Tensor,
    weight: "DTensor",
    targets: Tensor,
    expected: Tensor | None = None,
    *,
    bias: "DTensor | None" = None,
    chunk: int = 512,
) -> tuple[Tensor, Tensor]:
    """Return the result of `chunked_cross_entropy.linear_cross_entropy` for an output head (v, d) whose vocabulary v is
    sharded over a one-axis mesh.

    All ranks must pass the same hidden states (n, d), targets and weights (n,). All ranks get the same losses.
    """
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
    """Return the result (n,) of `chunked_cross_entropy.gradient_norm_scores` for a head whose vocabulary is sharded."""
    group, first = weight.device_mesh.get_group(), _first(weight)
    here = weight.to_local().to(hidden.dtype)
    here_bias = None if bias is None else bias.to_local().to(hidden.dtype)
    scores = []
    for part, target in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        logits = F.linear(part, here, here_bias).to(torch.promote_types(hidden.dtype, torch.float32))
        lse, target_logit = _over_vocabulary(logits, target - first, len(here), group)
        probability = (target_logit - lse).exp()
        squares = all_reduce((logits - lse[:, None]).exp().square().sum(-1), "sum", group)
        # sum of squared probabilities, with (1 - probability)² for the target
        scores.append(torch.where(target != IGNORED, squares - probability.square() + (1 - probability).square(), 0.0))
    return torch.cat(scores)


def _first(weight: "DTensor") -> int:
    """Return the index of the first vocabulary token of this rank's part."""
    (chunk,) = weight.__create_chunk_list__()
    return chunk.offsets[0]
