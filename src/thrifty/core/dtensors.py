"""Functions that check for DTensors or construct them. They import `torch.distributed.tensor` only when they are
called.

The reason: the import takes more than half as long as importing torch, and a run of one process has no DTensors.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    return hasattr(value, "device_mesh")


def dtensor_of_local(
    local: Tensor, mesh: DeviceMesh, placements: "Sequence[Placement]", shape: torch.Size, stride: tuple[int, ...]
) -> "DTensor":
    """Return the DTensor of `shape` whose local shard on this rank is `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def replicated_like(tensor: Tensor, divided: "DTensor") -> "DTensor":
    """Return the tensor as a DTensor replicated on the mesh of `divided`."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, divided.device_mesh, [Replicate()] * divided.device_mesh.ndim)


def with_partial_sums_added(tensor: "DTensor") -> "DTensor":
    """Return the DTensor with `Partial` placements reduced to `Replicate`."""
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
