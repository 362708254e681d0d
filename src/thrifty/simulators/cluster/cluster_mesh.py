"""Layout of a training run over ranks: mesh sizes, step settings, and blocks per pipeline stage."""

from dataclasses import dataclass
from functools import cached_property

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.setting_bounds import Positive, check_bounds
from thrifty.simulators.cluster.network_topology import Cluster, RankGroup
from thrifty.simulators.cluster.workload import Recompute, Workload, WorkloadPart


@dataclass(frozen=True)
class ClusterMesh:
    """Sizes of the mesh axes.

    Ranks are counted along tensor first, then shard, replicate, pipeline, as in Megatron-LM. Therefore ranks of a
    tensor group are neighbors, and pipeline stages are far apart.
    """

    replicate: Positive = 1
    shard: Positive = 1
    """Number of ranks over which ZeRO shards. The number of data ranks is `shard` · `replicate`."""
    tensor: Positive = 1
    pipeline: Positive = 1
    chunks: Positive = 1
    """Number of stages per pipeline rank (Narayanan et al. 2021, section 2.2)."""

    def __post_init__(self) -> None:
        check_bounds(self, "mesh")

    @property
    def data(self) -> int:
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    def groups(self, cluster: Cluster) -> dict[str, RankGroup]:
        """Return the groups of communicating ranks, by name.

        "tensor", "shard" and "replicate" are axes. "data" is shard and replicate together. "neighbours" are adjacent
        pipeline ranks, "ends" are the first and the last pipeline rank.
        """
        stride = self.tensor * self.data
        two = min(self.pipeline, 2)
        return {
            "tensor": cluster.group(self.tensor, 1),
            "shard": cluster.group(self.shard, self.tensor),
            "replicate": cluster.group(self.replicate, self.tensor * self.shard),
            "data": cluster.group(self.data, self.tensor),
            "neighbours": cluster.group(two, stride),
            "ends": cluster.group(two, stride * max(self.pipeline - 1, 1)),
        }


@dataclass(frozen=True)
class StepSettings:
    """Settings of a training step."""

    batch: int
    """Effective batch: number of examples per step, over all ranks and micro-batches."""
    micro_batch: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """True if the ranks of a tensor group divide the tokens of norms and residual sums among themselves."""
    zero: int = 0
    """ZeRO stage along `shard`. 0: no sharding. 1: optimizer state. 2: also gradients. 3: also parameters."""
    overlap: bool = True
    """True if collectives over the data ranks overlap with computation."""
    scatter: bool = True
    """True if each rank of a tensor group sends a part of the activations, and the next stage all-gathers the parts
    (Narayanan et al. 2021, section 4.1). False if each rank sends all activations."""
    number_format: str = "bfloat16"
    gradient_bytes: int = 2
    """Bytes per element of accumulated and reduced gradients; 4 for float32."""
    fused: bool = True
    """True if chains of elementwise operations run as one kernel."""


def micro_batches(mesh: ClusterMesh, settings: StepSettings) -> int:
    """Return the number of micro-batches per step and pipeline.

    Raises UsageError unless the effective batch is a multiple of the number of data ranks times the micro-batch.
    """
    examples = mesh.data * settings.micro_batch
    if min(settings.batch, settings.micro_batch) < 1 or settings.batch % examples:
        near = max(round(settings.batch / examples), 1) * examples
        raise UsageError(
            f"{settings.batch} examples do not divide into micro-batches of {settings.micro_batch} on {mesh.data} data "
            "ranks",
            fix=f"set the batch to a multiple of {examples}, such as {near}",
        )
    return settings.batch // examples


@dataclass(frozen=True)
class SimulatedStage:
    """A pipeline stage: consecutive parts of the model on one pipeline rank."""

    parts: tuple[WorkloadPart, ...]

    @cached_property
    def entry(self) -> float:
        return self.parts[0].entry

    def parameters(self, tensor: int) -> float:
        """Return the number of parameters per rank of a tensor group of size `tensor`."""
        return sum(part.parameters.per_rank(tensor) for part in self.parts)


def cut_stages(workload: Workload, stages: int) -> list[SimulatedStage]:
    """Cut the model into stages with the same number of blocks.

    If the blocks do not divide evenly, embedding and head each count as a block (as in Llama 3 2024, section 3.3.2). If
    blocks plus two do not divide evenly either, stages differ by at most one block, and middle stages have more blocks.
    Raises InfeasibleError for more stages than blocks, except for exactly two more: embedding and head are then own
    stages.
    """
    depth = len(workload.blocks)
    if stages > depth + 2 or (stages > depth and stages != depth + 2):
        raise InfeasibleError(
            f"{depth} blocks cannot make {stages} stages", fix=f"use {depth} stages or fewer (pipeline times chunks)"
        )
    if depth % stages == 0:
        counts = [depth // stages] * stages
    elif (depth + 2) % stages == 0:
        counts = [(depth + 2) // stages] * stages
        counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    else:
        counts = [depth // stages] * stages
        middle = sorted(range(stages), key=lambda stage: abs(stage - (stages - 1) / 2))
        for stage in middle[: depth % stages]:
            counts[stage] += 1
    blocks = iter(workload.blocks)
    parts = [[next(blocks) for _ in range(count)] for count in counts]
    parts[0].insert(0, workload.embedding)
    parts[-1].append(workload.head)
    return [SimulatedStage(tuple(each)) for each in parts]


def check_ranks(mesh: ClusterMesh, cluster: Cluster) -> None:
    """Raise UsageError unless mesh and cluster have the same number of ranks."""
    if mesh.ranks != cluster.ranks:
        per_replica = mesh.ranks // mesh.replicate
        raise UsageError(
            f"the mesh has {mesh.ranks} ranks, but the cluster has {cluster.ranks}",
            fix=f"set replicate to {max(cluster.ranks // per_replica, 1)}; or use a multiple of {per_replica} ranks",
        )
