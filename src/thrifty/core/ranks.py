"""Rank of this process, its part of the data, and collectives over ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from thrifty.core.batches import BatchSource, RankShard
from thrifty.core.errors import RefusedError
from thrifty.core.mesh import axis


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def refuse_no_group(who: str) -> None:
    """Raise RefusedError if no process group is initialized."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RefusedError(
            f"{who}: there is only one process, or torch.distributed is not initialized",
            fix="torchrun --nproc-per-node 2 SCRIPT, which begins with torch.distributed.init_process_group()",
        )


def rank_shard(source: BatchSource) -> BatchSource:
    """Return this rank's part of each effective batch. Ranks at the same position on the data axis receive the same
    part. Raise RefusedError if a batch cannot be divided equally."""
    data = axis("data")
    return source if data.size == 1 else RankShard(source, data.place, data.size)


def random_stream() -> int:
    """Return a number that is equal on all ranks that must use the same random values. These ranks compute the same
    blocks for the same examples."""
    data, pipeline = axis("data"), axis("pipeline")
    return pipeline.place * data.size + data.place


def gather_bytes(message: bytes, group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Return the message of each rank of a group (None: all ranks), in rank order, padded with spaces to one length."""
    with unset_fake_temporarily():
        size = dist.get_world_size(group)
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
        dist.all_gather(lengths, torch.tensor([len(message)], device=device), group=group)
        longest = max(int(length) for length in lengths)
        padded = torch.frombuffer(bytearray(message.ljust(longest)), dtype=torch.uint8).to(device)
        received = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(received, padded, group=group)
        return [part.cpu().numpy().tobytes() for part in received]


def from_first_rank(value: Tensor) -> Tensor:
    """Return the first rank's tensor on all ranks. The shape must be equal on all ranks."""
    if ranks() > 1:
        value = value.clone()
        dist.broadcast(value, 0)
    return value


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean of a tensor over all ranks, equal on each."""
    if ranks() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value /= ranks()
    return value
