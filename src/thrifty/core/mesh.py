"""Device mesh: the ranks of a run along named axes.

    pipeline    stages of the model in sequence
    replicate   copies of the state, each with a part of the data
    shard       ranks among which one copy of the state is divided, each with a part of the data
    tensor      ranks that compute every layer together, on the same data

Neighbors along `tensor` have consecutive ranks, so that they share a machine. Ranks of neighboring pipeline stages are
farthest apart. Like torch's process group, the mesh is global to a process. Without a mesh, all ranks are along the
data axis.
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
"""For each axis, the claim that uses its ranks, and the technique that error messages suggest. Any technique with the
claim can use the axis."""


@dataclass(frozen=True)
class Mesh:
    """Number of ranks along each axis. A 0 for `replicate` or `shard` means all ranks that other axes do not use."""

    replicate: Natural = 0
    shard: Natural = 0
    tensor: Positive = 1
    pipeline: Positive = 1

    def __post_init__(self) -> None:
        check_bounds(self, "mesh")

    @property
    def least_ranks(self) -> int:
        """Minimum number of ranks that fits the axes."""
        return math.prod(size for size in vars(self).values() if size)

    @property
    def label(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "one rank"

    def sizes(self, ranks: int, sharded: bool) -> dict[str, int]:
        """Return the number of ranks along each axis for `ranks` ranks in total. `sharded` is True if a technique
        shards parameters. Raise UsageError if the axes do not fit the number of ranks."""
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
                fix=f"start {self.least_ranks} ranks; or, if replicate or shard is 0, a multiple of {self.least_ranks}",
            )
        return sizes


@dataclass(frozen=True)
class MeshAxis:
    """Size of an axis, and this rank's position on the axis."""

    size: int = 1
    place: int = 0
    group: dist.ProcessGroup | None = None
    """Process group of the axis; None is all ranks."""


_ALONE = MeshAxis()
_laid: dict[str, DeviceMesh] = {}
"""The current mesh: the whole mesh as "all", each axis by its name, and "data" for replicate and shard combined."""


def set_mesh(sizes: Mapping[str, int], device: str) -> None:
    """Arrange all ranks along axes of these sizes. All ranks must call it together."""
    shape = tuple(sizes[name] for name in AXES)
    if not _laid or _laid["all"].shape != shape:
        mesh = init_device_mesh(device, shape, mesh_dim_names=AXES)
        _laid.update({name: mesh[name] for name in AXES}, all=mesh, data=mesh[DATA]._flatten("data"))


def clear_mesh() -> None:
    """Remove the mesh, for example when its process group ends."""
    _laid.clear()


def axis(name: str) -> MeshAxis:
    """Return the axis with this name; "data" is replicate and shard combined."""
    if not (dist.is_available() and dist.is_initialized()):
        return _ALONE
    if not _laid:
        return MeshAxis(dist.get_world_size(), dist.get_rank()) if name == "data" else _ALONE
    along = _laid[name]
    return _ALONE if along.size() == 1 else MeshAxis(along.size(), along.get_local_rank(), along.get_group())


def submesh(*names: str, device: str = "cpu") -> DeviceMesh:
    """Return the mesh along these axes only. Without a mesh, return all ranks along the last of these axes."""
    if not _laid:
        return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=names[-1:])
    return _laid["all"][names]
