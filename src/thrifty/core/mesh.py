"""The mesh: the ranks of a run in named axes.

    pipeline    stages of the model, one after the other
    replicate   copies of the state, each with its share of the data
    shard       ranks among which a copy of the state is divided, each with its share of the data
    tensor      ranks that compute every layer together, on the same data

Neighbours along `tensor` are neighbours in rank, so that they share a machine; stages are farthest apart. Like torch's
process group, the mesh is one for a process. Where none is laid, all ranks are along the data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thrifty.core.claims import Claim
from thrifty.core.errors import UsageError
from thrifty.core.setting_bounds import Natural, Positive, check_bounds

AXES = ("pipeline", "replicate", "shard", "tensor")
DATA = ("replicate", "shard")
"""Axes along which ranks see different examples."""

USED_BY = {
    "pipeline": (Claim.PIPELINE_PARALLELISM, "parallelism.pipeline"),
    "replicate": (Claim.DATA_PARALLELISM, "parallelism.replicate"),
    "shard": (Claim.PARAMETER_SHARDING, "parallelism.shard"),
    "tensor": (Claim.TENSOR_PARALLELISM, "parallelism.tensor"),
}
"""What a technique must claim to give work to the ranks along an axis, and the technique that is suggested for it.
The names are a choice: any technique with the claim will do."""


@dataclass(frozen=True)
class Mesh:
    """How many ranks there are along each axis. Where `replicate` or `shard` is 0, it is what the others leave."""

    replicate: Natural = 0
    shard: Natural = 0
    tensor: Positive = 1
    pipeline: Positive = 1

    def __post_init__(self) -> None:
        check_bounds(self, "mesh")

    @property
    def least_ranks(self) -> int:
        """The fewest with which it can be laid out."""
        return math.prod(size for size in vars(self).values() if size)

    @property
    def label(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "one rank"

    def sizes(self, ranks: int, sharded: bool) -> dict[str, int]:
        """Ranks along each axis where there are so many in all; `sharded` says whether the state is to be divided.
        Raises UsageError where they cannot be so arranged."""
        replicate, shard = self.replicate, self.shard
        left, rest = divmod(ranks, self.least_ranks)
        if sharded and not shard:
            replicate, shard = replicate or 1, left
        elif not replicate:
            replicate, shard = left, shard or 1
        sizes = {"pipeline": self.pipeline, "replicate": replicate, "shard": shard or 1, "tensor": self.tensor}
        if rest or math.prod(sizes.values()) != ranks:
            raise UsageError(
                f"{ranks} ranks cannot be laid out as a mesh of {self.label}",
                fix="start as many as the product of the mesh's axes, or a multiple that replicate or shard can take",
            )
        return sizes


@dataclass(frozen=True)
class MeshAxis:
    """This rank's place among those along an axis."""

    size: int = 1
    place: int = 0
    group: dist.ProcessGroup | None = None
    """Their process group; None is all ranks."""


_ALONE = MeshAxis()
_laid: dict[str, DeviceMesh] = {}
"""The mesh under "all", each of its axes, and "data"."""


def set_mesh(sizes: Mapping[str, int], device: str) -> None:
    """Arrange all ranks, which must come here together, along axes of these sizes."""
    shape = tuple(sizes[name] for name in AXES)
    if not _laid or _laid["all"].shape != shape:
        mesh = init_device_mesh(device, shape, mesh_dim_names=AXES)
        _laid.update({name: mesh[name] for name in AXES}, all=mesh, data=mesh[DATA]._flatten("data"))


def clear_mesh() -> None:
    """No mesh any more, as when the process group it was laid over ends."""
    _laid.clear()


def axis(name: str) -> MeshAxis:
    """The axis of this name; "data" is replicate and shard taken as one."""
    if not (dist.is_available() and dist.is_initialized()):
        return _ALONE
    if not _laid:
        return MeshAxis(dist.get_world_size(), dist.get_rank()) if name == "data" else _ALONE
    along = _laid[name]
    return _ALONE if along.size() == 1 else MeshAxis(along.size(), along.get_local_rank(), along.get_group())


def submesh(*names: str, device: str = "cpu") -> DeviceMesh:
    """The part of the mesh along these axes; where none is laid, all ranks along the last of them."""
    if not _laid:
        return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=names[-1:])
    return _laid["all"][names]
