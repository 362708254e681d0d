"""How a training run is laid out over ranks: sizes of axes, settings, and which blocks stand on which stage."""

from dataclasses import dataclass
from functools import cached_property

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.setting_bounds import Positive, check_bounds
from thrifty.simulators.cluster.network_topology import Cluster, RankGroup
from thrifty.simulators.cluster.workload import Recompute, Workload, WorkloadPart


@dataclass(frozen=True)
class ClusterMesh:
    """Sizes of the axes. Ranks are counted along tensor first, then shard, replicate, pipeline, so that the ranks of a
    tensor group are neighbours and stages far apart, as in Megatron-LM."""

    replicate: Positive = 1
    shard: Positive = 1
    """Over how many ranks ZeRO divides; together with `replicate` these are the data ranks."""
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
        """Ranks that talk to each other: along each axis, "data" being shard and replicate together; and of the
        pipeline "neighbours" and both "ends"."""
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
    """How a step is run."""

    batch: int
    """Effective batch: examples per step over all ranks and micro-batches."""
    micro_batch: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    """Whether norms and sums of residuals are divided among the ranks of a tensor group by tokens."""
    zero: int = 0
    """What is divided along `shard`: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    overlap: bool = True
    """Whether collectives over the data ranks run while something else is computed."""
    scatter: bool = True
    """Whether the ranks of a tensor group each send their share of what goes to the next stage, and gather it there
    (Narayanan et al. 2021, section 4.1), instead of each sending all of it."""
    number_format: str = "bfloat16"
    gradient_bytes: int = 2
    """Of a number in gradients that are kept and reduced: 4 where they add up in float32."""
    fused: bool = True
    """Whether chains of elementwise operations run as one kernel."""


def micro_batches(mesh: ClusterMesh, settings: StepSettings) -> int:
    """How many go through a pipeline in a step; UsageError where the effective batch is no multiple of them."""
    together = mesh.data * settings.micro_batch
    if min(settings.batch, settings.micro_batch) < 1 or settings.batch % together:
        near = max(round(settings.batch / together), 1) * together
        raise UsageError(
            f"{settings.batch} examples do not divide into micro-batches of {settings.micro_batch} on {mesh.data} data "
            "ranks",
            fix=f"set the batch to a multiple of {together}, such as {near}",
        )
    return settings.batch // together


@dataclass(frozen=True)
class SimulatedStage:
    """Consecutive parts of the model, on one pipeline rank."""

    parts: tuple[WorkloadPart, ...]

    @cached_property
    def entry(self) -> float:
        return self.parts[0].entry

    def parameters(self, tensor: int) -> float:
        """Numbers on each rank of a tensor group."""
        return sum(part.parameters.per_rank(tensor) for part in self.parts)


def cut_stages(workload: Workload, stages: int) -> list[SimulatedStage]:
    """The model in so many stages: the same number of blocks in each; or, where they do not divide, embedding and head
    counted as a block each (as Llama 3 2024 does, section 3.3.2); or as even as possible, more in the middle.

    Raises InfeasibleError for more stages than blocks, embedding and head.
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
    """UsageError where the mesh has not as many ranks as the cluster."""
    if mesh.ranks != cluster.ranks:
        apart = mesh.ranks // mesh.replicate
        raise UsageError(
            f"the mesh has {mesh.ranks} ranks and the cluster {cluster.ranks}",
            fix=f"make replicate {max(cluster.ranks // apart, 1)}, or the ranks a multiple of {apart}",
        )
