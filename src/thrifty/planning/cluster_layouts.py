"""Layouts of a run over the ranks of a cluster, with simulated steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from thrifty.core import mesh as core_mesh
from thrifty.core.errors import ThriftyError
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.network_topology import Cluster
from thrifty.simulators.cluster.simulated_step import simulate
from thrifty.simulators.cluster.step_report import StepReport
from thrifty.simulators.cluster.workload import Recompute, Workload

TECHNIQUES = {axis: technique for axis, (_, technique) in core_mesh.USED_BY.items()}
"""Names of the parallel techniques, by mesh axis."""
ACCUMULATE, RECOMPUTE = "large_batch.gradient_accumulation", "memory.recompute"
"""Techniques that a layout may add on each rank."""
MOST_PARTS = 64
"""Maximum number of micro-batches per rank. More micro-batches are not faster."""
NO_DIFFERENCE = 1.03
"""Minimum ratio of step times that counts as a difference between layouts."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "every")


@dataclass(frozen=True)
class ClusterLayout:
    """A layout of a run over a cluster: a mesh, step settings, and the report of the simulated step."""

    mesh: ClusterMesh
    settings: StepSettings
    report: StepReport

    @property
    def seconds(self) -> float:
        return self.report.step_seconds

    @property
    def changes(self) -> int:
        """Number of changes to the run, a measure of complexity. It counts used axes other than replicate, the ZeRO
        stage, and 1 each for micro-batches and for recompute."""
        axes = sum(getattr(self.mesh, axis) > 1 for axis in ("shard", "tensor", "pipeline"))
        return axes + self.settings.zero + (self.report.micro_batches > 1) + (self.settings.recompute != "none")

    @property
    def label(self) -> str:
        axes = [f"{axis}={getattr(self.mesh, axis)}" for axis in TECHNIQUES]
        words = [axis for axis in axes if not axis.endswith("=1")] or ["one rank"]
        if self.mesh.shard > 1:
            words.append(f"ZeRO {self.settings.zero}")
        if self.report.micro_batches > 1:
            words.append(f"{self.report.micro_batches} micro-batches")
        if self.settings.recompute != "none":
            words.append(f"recompute {self.settings.recompute}")
        return ", ".join(words)


def recipe_mesh(mesh: ClusterMesh) -> core_mesh.Mesh:
    """Convert a simulated mesh to the mesh of a recipe."""
    return core_mesh.Mesh(**{axis: getattr(mesh, axis) for axis in core_mesh.AXES})


def layouts(
    workload: Workload, cluster: Cluster, batch: int, number_format: str, recompute: Recompute | None = None
) -> list[ClusterLayout]:
    """Return all layouts that divide the effective batch evenly, sorted by step time, then by `changes`.

    Step times within 3 % count as equal. If `recompute` is set, all layouts use it.
    """
    candidates = []
    for mesh in meshes(cluster.ranks, cluster.per_node, len(workload.blocks)):
        for settings in _settings(mesh, batch, number_format, (recompute,) if recompute else RECOMPUTES):
            try:
                candidates.append(ClusterLayout(mesh, settings, simulate(workload, cluster, mesh, settings)))
            except ThriftyError:  # incompatible sizes
                continue
    return sorted(candidates, key=lambda layout: (math.floor(math.log(layout.seconds, NO_DIFFERENCE)), layout.changes))


def meshes(ranks: int, per_node: int, depth: int) -> Iterator[ClusterMesh]:
    """Yield meshes in which each tensor-parallel group is inside one node.

    Data-parallel ranks replicate the model, shard it, or shard it inside nodes and replicate it across nodes.
    """
    for tensor in _divisors(ranks, per_node):
        for pipeline in _divisors(ranks // tensor, depth):
            data = ranks // tensor // pipeline
            inside = max(_divisors(data, max(per_node // tensor, 1)))
            for shard in sorted({1, inside, data}):
                yield ClusterMesh(replicate=data // shard, shard=shard, tensor=tensor, pipeline=pipeline)


def _settings(
    mesh: ClusterMesh, batch: int, number_format: str, again: tuple[Recompute, ...]
) -> Iterator[StepSettings]:
    own, left = divmod(batch, mesh.data)
    if left:
        return
    for parts in (parts for parts in _divisors(own, MOST_PARTS) if parts >= mesh.pipeline):
        for zero in (1, 2, 3) if mesh.shard > 1 else (0,):
            for recompute in again:
                yield StepSettings(
                    batch=batch,
                    micro_batch=own // parts,
                    recompute=recompute,
                    zero=zero,
                    number_format=number_format,
                    gradient_bytes=4,
                )


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
