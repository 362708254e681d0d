"""Data parallelism (Goyal et al. 2017): copy the model to each rank and divide each batch.

Paper       Goyal et al. 2017 (arXiv 1706.02677), section 3, synchronous SGD.
Promise     Equal to the single-process run at the same effective batch and data order, within rounding.
Use         torch.distributed.init_process_group()  # in a script that torchrun starts
            model = thrifty.apply(model, "replicate")
            optimizer = thrifty.optim.AdamW(model, lr=1e-3)
Start with  `replicate`. In your own loop each rank reads its own examples (DistributedSampler), and all ranks read
            equally many examples.
Cost        One all-reduce of all gradients per step. Each rank sends at most 2 · parameters elements.
Avoid       BatchNorm, because each rank normalizes its own examples separately. The run then differs from the
            single-process run.
Does not    Save memory, because each rank holds the whole model and optimizer state.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from thrifty.core.backward import Backward, BackwardResult
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.claims import Claim
from thrifty.core.errors import RefusedError
from thrifty.core.footprint import Footprint
from thrifty.core.mesh import MeshAxis, axis
from thrifty.core.objective import Objective
from thrifty.core.ranks import rank_shard, ranks, refuse_no_group
from thrifty.core.shard_layout import local_tensors
from thrifty.core.stages import Stage
from thrifty.core.technique import Numerics, Technique
from thrifty.core.written_buffers import broadcast_buffers
from thrifty.distributed.after_backward import call_after_backward

BUCKET = 8_000_000
"""Number of elements per all-reduce: large enough for full bandwidth, and small in memory."""


def sum_over(group: dist.ProcessGroup | None, tensors: list[torch.Tensor]) -> None:
    """All-reduce each tensor in place over a group of ranks (None means all ranks).

    Tensors are copied into flat buckets, because few large messages are faster than many small ones.
    """
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
    """Return a backward pass that sums gradients and loss over a group of ranks (None means all ranks)."""

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


def average_over(data: MeshAxis, model: nn.Module) -> None:
    """Replace gradients by their mean over ranks. A gradient that is None on all ranks stays None."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    has_gradient = has_gradient.to(parameters[0].device) if parameters else has_gradient
    dist.all_reduce(has_gradient, dist.ReduceOp.MAX, data.group)
    gradients = []
    for parameter, is_needed in zip(parameters, has_gradient.tolist(), strict=True):
        if is_needed:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.div_(data.size)
            gradients.append(parameter.grad)
    sum_over(data.group, local_tensors(gradients))
    broadcast_buffers(model, data.group)


class ReplicatedDataParallel(Technique):
    """Differs from the paper: gradients are summed with per-example weights of the effective batch. Ranks with unequal
    numbers of examples therefore count correctly. In your own loop gradients are averaged over ranks. BatchNorm uses
    the running statistics of the first rank, as in torch's DistributedDataParallel."""

    stage, numerics, tolerance = Stage.REDUCE, Numerics.ROUNDING, 1e-4
    claims = frozenset({Claim.DATA_PARALLELISM})

    def model(self, model: nn.Module) -> nn.Module:
        data = axis("data")
        if data.size > 1:
            for values in local_tensors([parameter.data for parameter in model.parameters()]):
                dist.broadcast(values, group=data.group, group_src=0)
        return model

    @property
    def optional_seams(self) -> frozenset[str]:
        return frozenset({"batches", "backward"})

    def change_forward(self, model: nn.Module) -> None:
        refuse_no_group(self.name)
        data = axis("data")
        if data.size == 1 < ranks():
            raise RefusedError(
                f"{self.name}: parallelism.tensor uses all ranks for one copy of the model",
                fix="apply it without parallelism.tensor",
            )
        if data.size > 1:
            call_after_backward(model, partial(average_over, data))

    def batches(self, source: BatchSource) -> BatchSource:
        return rank_shard(source)

    def backward(self, backward: Backward) -> Backward:
        data = axis("data")
        return summed(backward, data.group) if data.size > 1 else backward

    def footprint(self, footprint: Footprint) -> Footprint:
        size = axis("data").size
        if size == 1:
            return footprint
        # buckets are allocated when activations are freed
        summing = footprint.gradients + min(4 * BUCKET, footprint.gradients)
        sent = 2 * footprint.gradients * (1 - 1 / size)
        return footprint.peaking(max(footprint.peak, summing)).add(traffic=sent)
