"""Seconds of each component of a step: actions of stages, transfers between stages, collectives of data ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from thrifty.simulators.cluster import collective_times
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, SimulatedStage, StepSettings
from thrifty.simulators.cluster.device_efficiency import SIXTEEN_BITS, DeviceEfficiency, seconds
from thrifty.simulators.cluster.network_topology import Cluster
from thrifty.simulators.cluster.rank_memory import MOMENTS, WEIGHT
from thrifty.simulators.cluster.workload import PassWork, WorkloadPart


@dataclass(frozen=True)
class ActionSeconds:
    compute: float
    tensor: float
    """Seconds of collectives of the tensor group. The rank waits for these collectives."""
    data: float
    """Seconds of collectives over the data ranks, without overlap with computation."""

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.data


class LayoutCosts:
    """Costs of one layout on one cluster. The costs of identical stages are computed once."""

    def __init__(self, cluster: Cluster, mesh: ClusterMesh, settings: StepSettings, rates: DeviceEfficiency):
        self.mesh, self.settings, self.rates, self.device = mesh, settings, rates, cluster.device
        between = replace(cluster.between, bandwidth=cluster.between.bandwidth * rates.links)
        self.groups = mesh.groups(replace(cluster, between=between))
        self.known: dict[tuple[int, ...], dict[str, ActionSeconds]] = {}

    def actions(self, stage: SimulatedStage) -> dict[str, ActionSeconds]:
        """Return the seconds of each kind of action on a stage."""
        kind = tuple(map(id, stage.parts))
        if kind not in self.known:
            self.known[kind] = self._actions(stage)
        return self.known[kind]

    def _actions(self, stage: SimulatedStage) -> dict[str, ActionSeconds]:
        recompute = self.settings.recompute
        forward, forward_sums = self._passes((part, part.forward, 1) for part in stage.parts)
        recomputed, recomputed_sums = self._passes((part, part.recomputed(recompute), 1) for part in stage.parts)
        backward, backward_sums = self._passes((part, part.backward, 2) for part in stage.parts)
        weights, _ = self._passes((part, PassWork(flops=part.for_weights), 1) for part in stage.parts)
        compute, tensor = recomputed + backward, recomputed_sums + backward_sums
        weights = min(weights, compute)
        gather, scatter = self._per_micro_batch(stage)
        return {
            "F": self._waiting(forward, forward_sums, gather),
            "B": self._waiting(compute, tensor, gather + scatter),
            "I": self._waiting(compute - weights, tensor, gather),
            "W": self._waiting(weights, 0.0, scatter),
        }

    def _passes(self, passes: Iterable[tuple[WorkloadPart, PassWork, int]]) -> tuple[float, float]:
        """Return the seconds of computation and of the tensor group's collectives for one micro-batch.

        Each element of `passes` is (part, work, number of reads or writes of the part's weights).
        """
        nonempty = [(part, work, times) for part, work, times in passes if work != PassWork()]
        computing = sum(self._computing(*each) for each in nonempty)
        return computing, sum(self._summing(work) for _, work, _ in nonempty)

    def _computing(self, part: WorkloadPart, work: PassWork, touches: int) -> float:
        weights = part.parameters.per_rank(self.mesh.tensor) * WEIGHT * touches if work.flops.total else 0.0
        number_format = self.settings.number_format
        return seconds(
            work,
            self.settings.micro_batch,
            self.device,
            self.rates,
            number_format=number_format if part.is_block else SIXTEEN_BITS.get(number_format, number_format),
            tensor=self.mesh.tensor,
            sequence_parallel=self.settings.sequence_parallel,
            weights=weights,
            fused=self.settings.fused,
        )

    def _summing(self, work: PassWork) -> float:
        if not work.reduces:
            return 0.0
        size = work.reduced / work.reduces * self.settings.micro_batch
        kinds = ("reduce_scatter", "all_gather") if self.settings.sequence_parallel else ("all_reduce",)
        return work.reduces * sum(self._collective(kind, size, "tensor") for kind in kinds)

    def _collective(self, kind: str, size: float, axis: str) -> float:
        group = self.groups[axis]
        return collective_times.seconds(kind, size, group) if group.size > 1 and size else 0.0

    def _per_micro_batch(self, stage: SimulatedStage) -> tuple[float, float]:
        """Return the seconds to all-gather a stage's weights for one pass, and to reduce-scatter its gradients."""
        zero, gather, scatter = self.settings.zero, 0.0, 0.0
        for part in stage.parts:
            parameters = part.parameters.per_rank(self.mesh.tensor)
            gather += self._collective("all_gather", parameters * WEIGHT, "shard") if zero == 3 else 0.0
            size = parameters * self.settings.gradient_bytes
            scatter += self._collective("reduce_scatter", size, "shard") if zero >= 2 else 0.0
        return gather, scatter

    def _waiting(self, compute: float, tensor: float, data: float) -> ActionSeconds:
        hidden = compute + tensor if self.settings.overlap else 0.0
        return ActionSeconds(compute, tensor, max(data - hidden, 0.0))

    def transfer(self, stages: Sequence[SimulatedStage]) -> float:
        """Return the seconds to send hidden states or their gradients between neighboring stages."""
        size = max(stage.entry for stage in stages) * self.settings.micro_batch
        if not (self.settings.scatter or self.settings.sequence_parallel):
            return self._collective("send", size, "neighbours")
        gathering = 0.0 if self.settings.sequence_parallel else self._collective("all_gather", size, "tensor")
        return self._collective("send", size / self.mesh.tensor, "neighbours") + gathering

    def reduction(self, stage: SimulatedStage) -> float:
        """Return the seconds of the collectives that reduce a stage's gradients over the data ranks once per step."""
        size = stage.parameters(self.mesh.tensor) * self.settings.gradient_bytes
        if self.settings.zero == 0:
            return self._collective("all_reduce", size, "data")
        scattered = self._collective("reduce_scatter", size, "shard") if self.settings.zero == 1 else 0.0
        return scattered + self._collective("all_reduce", size / self.mesh.shard, "replicate")

    def tied(self, shared: float) -> float:
        """Return the seconds to all-reduce the gradient of `shared` parameters between the first and the last stage."""
        return self._collective("all_reduce", shared / self.mesh.tensor * self.settings.gradient_bytes, "ends")

    def update(self, parameters: float) -> float:
        """Return the seconds of the optimizer step on a rank with `parameters` parameters.

        The optimizer reads and writes its state, reads the gradient twice (norm and update), and writes the weight.
        """
        own = parameters / (self.mesh.shard if self.settings.zero else 1)
        moved = own * (2 * MOMENTS + 2 * self.settings.gradient_bytes + WEIGHT)
        return moved / (self.device.bandwidth * self.rates.memory)

    def gathering(self, parameters: float) -> float:
        """Return the seconds to all-gather the updated weights after a sharded optimizer step."""
        return self._collective("all_gather", parameters * WEIGHT, "shard") if self.settings.zero in (1, 2) else 0.0
