"""DTensors, told from plain tensors and made without importing what they are made of before there are any.

`torch.distributed.tensor` takes more than half as long to import as torch itself, and a run of one process has none.
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
    """Return the tensor of `shape` of which this rank holds `local`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def replicated_like(tensor: Tensor, divided: "DTensor") -> "DTensor":
    """Return a tensor that every rank has on the mesh of another one."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, divided.device_mesh, [Replicate()] * divided.device_mesh.ndim)


def with_partial_sums_added(tensor: "DTensor") -> "DTensor":
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
