"""Simulation of one training step on a cluster: seconds by cause, and the memory of each rank.

All data ranks have the same timeline, and so have all ranks of a tensor group. Therefore one pipeline is simulated for
any number of ranks. A step consists of the pipeline's schedule, collectives of the data ranks that do not overlap with
the schedule, and the optimizer. A rank waits for collectives inside a block, but not for transfers between stages.
"""

from collections.abc import Sequence

from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings, check_ranks, cut_stages, micro_batches
from thrifty.simulators.cluster.device_efficiency import DeviceEfficiency, find_efficiency
from thrifty.simulators.cluster.network_topology import Cluster
from thrifty.simulators.cluster.pipeline_events import PipelineTimeline, play
from thrifty.simulators.cluster.pipeline_schedules import placement, schedule
from thrifty.simulators.cluster.rank_memory import (
    MOMENTS,
    WEIGHT,
    RankMemory,
    activation_bytes,
    recomputed_bytes,
    state_bytes,
)
from thrifty.simulators.cluster.step_costs import LayoutCosts
from thrifty.simulators.cluster.step_report import StepReport, StepSeconds
from thrifty.simulators.cluster.workload import Workload


def simulate(
    workload: Workload,
    cluster: Cluster,
    mesh: ClusterMesh,
    settings: StepSettings,
    rates: DeviceEfficiency | None = None,
) -> StepReport:
    """Simulate one training step on a cluster. Raises UsageError or InfeasibleError for incompatible sizes.

    A step that exceeds device memory raises no error; the report says that it does not fit.
    """
    check_ranks(mesh, cluster)
    return _Step(workload, cluster, mesh, settings, rates or find_efficiency(cluster.device.name)).report()


class _Step:
    def __init__(
        self, workload: Workload, cluster: Cluster, mesh: ClusterMesh, settings: StepSettings, rates: DeviceEfficiency
    ):
        self.workload, self.mesh, self.settings, self.device = workload, mesh, settings, cluster.device
        self.parts = micro_batches(mesh, settings)
        self.orders = schedule(settings.schedule, mesh.pipeline, self.parts, mesh.chunks)
        self.places = placement(self.orders)
        self.stages = cut_stages(workload, mesh.stages)
        self.costs = LayoutCosts(cluster, mesh, settings, rates)
        self.actions = [self.costs.actions(stage) for stage in self.stages]

    def report(self) -> StepReport:
        timeline = self._play(self.costs.transfer(self.stages))
        stage_bytes = tuple(activation_bytes(stage.parts, self.mesh.tensor, self.settings) for stage in self.stages)
        return StepReport(
            self.workload,
            self.mesh,
            self.settings,
            self.parts,
            self._seconds(timeline),
            self.device.rate(self.settings.number_format),
            tuple(self._memory(timeline, rank, stage_bytes) for rank in range(self.mesh.pipeline)),
            timeline,
            stage_bytes,
            self.costs.rates,
        )

    def _play(self, transfer: float) -> PipelineTimeline:
        seconds = [{kind: action.total for kind, action in stage.items()} for stage in self.actions]
        return play(self.orders, lambda action: seconds[action.stage][action.kind], lambda source, target: transfer)

    def _seconds(self, timeline: PipelineTimeline) -> StepSeconds:
        busiest = max(range(self.mesh.pipeline), key=timeline.busy)
        actions = [self.actions[event.action.stage][event.action.kind] for event in timeline.by_rank[busiest]]
        computed = self._play(0.0).makespan if self.mesh.pipeline > 1 else timeline.makespan
        reduced = max(self._reduced(timeline, rank) for rank in range(self.mesh.pipeline))
        parameters = max(self._parameters(rank) for rank in range(self.mesh.pipeline))
        first = timeline.by_rank[0][0]
        hidden = first.end - first.start if self.settings.overlap else 0.0
        return StepSeconds(
            compute=sum(action.compute for action in actions),
            tensor=sum(action.tensor for action in actions),
            bubble=computed - timeline.busy(busiest),
            transfers=timeline.makespan - computed,
            data=sum(action.data for action in actions)
            + (reduced - timeline.makespan)
            + max(self.costs.gathering(parameters) - hidden, 0.0),
            optimizer=self.costs.update(parameters),
        )

    def _reduced(self, timeline: PipelineTimeline, rank: int) -> float:
        """Return the time at which the gradients of a pipeline rank are reduced over the data ranks.

        The reduction of a stage starts when the first part of the stage has its final gradient. Without overlap, the
        reduction starts after the last action.
        """
        events = timeline.by_rank[rank]
        done, total = 0.0, 0.0
        last = {event.action.stage: event for event in events if event.action.kind in ("B", "W")}
        for stage, event in sorted(last.items(), key=lambda pair: pair[1].end):
            seconds = self.costs.reduction(self.stages[stage])
            total += seconds
            pieces = len(self.stages[stage].parts)
            start = event.start + (event.end - event.start) / pieces
            done = max(max(done, start) + seconds, event.end + seconds / pieces)
        if not self.settings.overlap:
            done = events[-1].end + total
        is_tied = self.places[0] != self.places[-1]
        return max(done, timeline.makespan) + (self.costs.tied(self.workload.shared) if is_tied else 0.0)

    def _own(self, rank: int) -> list[int]:
        return [stage for stage, place in enumerate(self.places) if place == rank]

    def _parameters(self, rank: int) -> float:
        """Return the number of parameters on a rank. A tied embedding counts on the first and on the last stage."""
        own = self._own(rank)
        has_copy = self.mesh.stages - 1 in own and 0 not in own
        parameters = sum(self.stages[stage].parameters(self.mesh.tensor) for stage in own)
        return parameters + (self.workload.shared / self.mesh.tensor if has_copy else 0.0)

    def _memory(self, timeline: PipelineTimeline, rank: int, stage_bytes: Sequence[float]) -> RankMemory:
        settings, tensor, own = self.settings, self.mesh.tensor, [self.stages[stage] for stage in self._own(rank)]
        gathered = 0.0
        if settings.zero == 3:
            largest = max(part.parameters.per_rank(tensor) for stage in own for part in stage.parts)
            gathered = largest * (WEIGHT + settings.gradient_bytes)
        sizes = {"weight": WEIGHT, "gradient": settings.gradient_bytes, "optimizer": MOMENTS}
        return RankMemory(
            rank,
            state_bytes(self._parameters(rank), settings.zero, self.mesh.shard, **sizes),
            activations=timeline.peak(rank, lambda stage: stage_bytes[stage]),
            temporary=max(recomputed_bytes(stage.parts, tensor, settings) for stage in own) + gathered,
            limit=self.device.memory,
        )
