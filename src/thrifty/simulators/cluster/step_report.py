"""What is known of a simulated step: its seconds and where they went, rates, and memory."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.device_efficiency import DeviceEfficiency
from thrifty.simulators.cluster.pipeline_events import PipelineTimeline
from thrifty.simulators.cluster.rank_memory import RankMemory
from thrifty.simulators.cluster.workload import Workload

RATES = ("model_flops", "hardware_flops", "mfu", "hfu", "tokens_per_second")
"""Properties that a report prints beside its fields."""


@dataclass(frozen=True)
class StepSeconds:
    """Of a step on the rank that computes longest. They add up to the step."""

    compute: float
    tensor: float
    """Collectives of tensor groups."""
    bubble: float
    """Waiting for other stages to compute."""
    transfers: float
    """Waiting longer than that since messages between stages take time."""
    data: float
    """Collectives over the data ranks that nothing hides."""
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
    """FLOP/s of the device in the number format of the run."""
    memory: tuple[RankMemory, ...]
    """Of each pipeline rank."""
    timeline: PipelineTimeline
    stage_bytes: tuple[float, ...]
    """Activations that one micro-batch leaves on each stage."""
    rates: DeviceEfficiency

    @cached_property
    def model_flops(self) -> float:
        """FLOP/s of each device that the model needs: what MFU counts."""
        return self._rate(self.workload.model_flops)

    @cached_property
    def hardware_flops(self) -> float:
        """FLOP/s of each device with what is recomputed: what HFU counts."""
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
        """Between which values a figure of time is expected nine times out of ten: "step_seconds" or one of `RATES`."""
        value, low, high = getattr(self, name), self.rates.low, self.rates.high
        return (value * low, value * high) if name == "step_seconds" else (value / high, value / low)

    @property
    def fullest(self) -> RankMemory:
        return max(self.memory, key=lambda rank: rank.total)

    @property
    def fits(self) -> bool:
        return self.fullest.fits

    def activations(self, rank: int) -> list[tuple[float, float]]:
        """(seconds, bytes) of a pipeline rank, from each change on."""
        return self.timeline.live(rank, lambda stage: self.stage_bytes[stage])

    def as_dict(self) -> dict[str, Any]:
        """Plain data: all but the timeline."""
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
