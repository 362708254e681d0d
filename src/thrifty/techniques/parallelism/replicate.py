"""Replicate: data parallelism. Every rank holds the whole model and takes an equal share of each effective batch.

Paper     the synchronous scheme of Goyal et al. 2017 (arXiv 1706.02677), section 3, with the sum taken over example
          weights that are fixed for the effective batch, so that no rank's mean is averaged with another's.
Promise   the single-process run at the same effective batch and in the same data order, within the order of summation.
Cost      all gradients are summed over the ranks once a step: 2 · parameters elements sent by each rank.
Avoid     BatchNorm, which normalizes the examples of each rank by themselves: such a run is not the single-process one.
          Running statistics are those of the first rank, as in torch's DistributedDataParallel.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.claims import Claim
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import axis
from thrifty.core.objective import Objective
from thrifty.core.ranks import rank_shard
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.core.written_buffers import broadcast_buffers

BUCKET = 8_000_000
"""Elements summed in one collective: enough to fill a link, little enough to stay out of peak memory."""


def sum_over(group: dist.ProcessGroup | None, tensors: list[torch.Tensor]) -> None:
    """Replace each tensor by its sum over a group of ranks (None: all), several at a time in flat buckets."""
    bucket: list[torch.Tensor] = []
    for index, tensor in enumerate(tensors):
        bucket.append(tensor)
        last = index == len(tensors) - 1
        if last or sum(t.numel() for t in bucket) >= BUCKET or tensors[index + 1].dtype != tensor.dtype:
            flat = torch.cat([t.flatten() for t in bucket])
            dist.all_reduce(flat, group=group)
            for target, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                target.copy_(part.view_as(target))
            bucket = []


def summed(backward: Backward, group: dist.ProcessGroup | None) -> Backward:
    """A backward pass over this rank's share, then the sum of gradients and loss over a group of ranks (None: all)."""

    def over_ranks(model: nn.Module, objective: Objective, batch: Batch) -> BackwardResult:
        outcome = backward(model, objective, batch)
        gradients = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        loss = outcome.loss.clone()
        sum_over(group, [*local_tensors(gradients), loss])
        broadcast_buffers(model, group)
        return replace(outcome, loss=loss)

    return over_ranks


@dataclass(frozen=True)
class ReplicatedDataParallel(Technique):
    stage, numerics, tolerance = Stage.REDUCE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.DATA_PARALLELISM})

    def model(self, model: nn.Module) -> nn.Module:
        data = axis("data")
        if data.size > 1:
            for values in local_tensors([parameter.data for parameter in model.parameters()]):
                dist.broadcast(values, group=data.group, group_src=0)
        return model

    def batches(self, source: BatchSource) -> BatchSource:
        return rank_shard(source)

    def backward(self, backward: Backward) -> Backward:
        data = axis("data")
        return summed(backward, data.group) if data.size > 1 else backward

    def footprint(self, footprint: Footprint) -> Footprint:
        size = axis("data").size
        if size == 1:
            return footprint
        # what is summed at a time is there when activations are not
        summing = footprint.gradients + min(4 * BUCKET, footprint.gradients)
        sent = 2 * footprint.gradients * (1 - 1 / size)
        return footprint.peaking(max(footprint.peak, summing)).add(traffic=sent)
