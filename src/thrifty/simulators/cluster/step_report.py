"""Report of a simulated training step: seconds by cause, FLOP/s and memory."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.device_efficiency import DeviceEfficiency
from thrifty.simulators.cluster.pipeline_events import PipelineTimeline
from thrifty.simulators.cluster.rank_memory import RankMemory
from thrifty.simulators.cluster.workload import Workload

RATES = ("model_flops", "hardware_flops", "mfu", "hfu", "tokens_per_second")
"""Names of properties of a report that are printed in addition to its fields."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step on the rank with the most computation. The sum of all fields is the step time."""

    compute: float
    tensor: float
    """Seconds of collectives of tensor groups."""
    bubble: float
    """Seconds of waiting for computation of other stages."""
    transfers: float
    """Additional seconds of waiting for transfers between stages."""
    data: float
    """Seconds of collectives over the data ranks, without overlap with computation."""
    optimizer: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class StepReport:
    workload: Workload
    mesh: ClusterMesh
    settings: StepSettings
    micro_batches: int
    seconds: StepSeconds
    peak: float
    """Peak FLOP/s of the device in the number format of the run."""
    memory: tuple[RankMemory, ...]
    """Memory of each pipeline rank."""
    timeline: PipelineTimeline
    stage_bytes: tuple[float, ...]
    """Bytes of saved activations per micro-batch, for each stage."""
    rates: DeviceEfficiency

    @cached_property
    def model_flops(self) -> float:
        """FLOP/s per device, excluding recompute, as in MFU."""
        return self._rate(self.workload.model_flops)

    @cached_property
    def hardware_flops(self) -> float:
        """FLOP/s per device, including recompute, as in HFU."""
        return self._rate(self.workload.hardware_flops(self.settings.recompute))

    @property
    def step_seconds(self) -> float:
        return self.seconds.total

    def _rate(self, flops: float) -> float:
        return flops * self.settings.batch / self.step_seconds / self.mesh.ranks

    @property
    def mfu(self) -> float:
        return self.model_flops / self.peak

    @property
    def hfu(self) -> float:
        return self.hardware_flops / self.peak

    @property
    def tokens_per_second(self) -> float:
        return self.settings.batch * self.workload.length / self.step_seconds

    def interval(self, name: str) -> tuple[float, float]:
        """Return the 90 % interval of the quantity `name`: "step_seconds" or a name in `RATES`."""
        value, low, high = getattr(self, name), self.rates.low, self.rates.high
        return (value * low, value * high) if name == "step_seconds" else (value / high, value / low)

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        return self.fullest.fits

    def activations(self, rank: int) -> list[tuple[float, float]]:
        """Return the live activations on a pipeline rank as (seconds, bytes) pairs, one per change."""
        return self.timeline.live(rank, lambda stage: self.stage_bytes[stage])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, without the timeline."""
        return {
            "model": self.workload.name,
            "parameters": self.workload.parameters,
            "mesh": {**asdict(self.mesh), "ranks": self.mesh.ranks},
            "settings": asdict(self.settings),
            "micro_batches": self.micro_batches,
            "step_seconds": self.step_seconds,
            "seconds": asdict(self.seconds),
            "bubble": self.timeline.bubble,
            **{name: getattr(self, name) for name in RATES},
            "intervals": {name: self.interval(name) for name in ("step_seconds", *RATES)},
            "interval_basis": self.rates.basis,
            "memory": [{**asdict(rank), "total": rank.total, "fits": rank.fits} for rank in self.memory],
        }
