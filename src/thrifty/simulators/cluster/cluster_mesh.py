"""Layout of a training run over ranks: mesh sizes, step settings, and the blocks of each stage."""

from dataclasses import dataclass
from functools import cached_property

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.setting_bounds import Positive, check_bounds
from thrifty.simulators.cluster.network_topology import Cluster, RankGroup
from thrifty.simulators.cluster.workload import Recompute, Workload, WorkloadPart


@dataclass(frozen=True)
class ClusterMesh:
    """Sizes of the mesh axes.

    Ranks are counted along tensor first, then shard, replicate, pipeline, as in Megatron-LM. So the ranks of a tensor
    group are neighbours, and stages are far apart.
    """

    replicate: Positive = 1
    shard: Positive = 1
    """Ranks over which ZeRO divides; `shard` times `replicate` are the data ranks."""
    tensor: Positive = 1
    pipeline: Positive = 1
    chunks: Positive = 1
    """Stages on each pipeline rank (Narayanan et al. 2021, section 2.2)."""

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

        There is one for each axis, "data" for shard and replicate together, and the pipeline's "neighbours" and "ends".
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
    """Effective batch: examples per step over all ranks and micro-batches."""
    micro_batch: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """True if norms and sums of residuals are divided among the ranks of a tensor group by tokens."""
    zero: int = 0
    """ZeRO stage along `shard`: 0 divides nothing, 1 the optimizer state, 2 gradients too, 3 parameters too."""
    overlap: bool = True
    """True if collectives over the data ranks overlap with computation."""
    scatter: bool = True
    """True if each rank of a tensor group sends its part of the activations to the next stage, which gathers them
    (Narayanan et al. 2021, section 4.1). False if each rank sends all of them."""
    number_format: str = "bfloat16"
    gradient_bytes: int = 2
    """Bytes of an element of accumulated and reduced gradients: 4 for float32."""
    fused: bool = True
    """True if chains of elementwise operations run as one kernel."""


def micro_batches(mesh: ClusterMesh, settings: StepSettings) -> int:
    """Return the number of micro-batches of a pipeline in a step.

    Raises UsageError if the effective batch is not a multiple of data ranks times micro-batch.
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
    """Consecutive parts of the model, on one pipeline rank."""

    parts: tuple[WorkloadPart, ...]

    @cached_property
    def entry(self) -> float:
        return self.parts[0].entry

    def parameters(self, tensor: int) -> float:
        """Return the number of parameters on each rank of a tensor group."""
        return sum(part.parameters.per_rank(tensor) for part in self.parts)


def cut_stages(workload: Workload, stages: int) -> list[SimulatedStage]:
    """Cut the model into stages with equally many blocks.

    If the blocks do not divide, embedding and head count as a block each (as in Llama 3 2024, section 3.3.2). If that
    does not divide either, stages are as even as possible, with more blocks in the middle. Raises InfeasibleError for
    more stages than blocks, unless embedding and head are stages of their own.
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
    """Raise UsageError unless the mesh has as many ranks as the cluster."""
    if mesh.ranks != cluster.ranks:
        per_replica = mesh.ranks // mesh.replicate
        raise UsageError(
            f"the mesh has {mesh.ranks} ranks and the cluster {cluster.ranks}",
            fix=f"set replicate to {max(cluster.ranks // per_replica, 1)}, or the ranks to a multiple of {per_replica}",
        )
