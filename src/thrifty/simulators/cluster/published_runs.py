"""Training runs with published speed (`published_runs.toml`): model, mesh, settings and measured value."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from thrifty.simulators.cluster.closed_form_workload import DecoderSizes, transformer
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.device_efficiency import DeviceEfficiency
from thrifty.simulators.cluster.network_topology import find_cluster
from thrifty.simulators.cluster.simulated_step import StepReport, simulate
from thrifty.simulators.cluster.workload import Workload

Measure = Literal["hardware_flops", "model_flops", "mfu", "step_seconds"]
"""Published quantities. "hardware_flops": FLOP/s per device including recompute. "model_flops": excluding recompute.
"mfu": "model_flops" / peak. "step_seconds": seconds per step."""


@dataclass(frozen=True)
class PublishedRun:
    """One run of a published table."""

    name: str
    paper: str
    table: str
    sizes: DecoderSizes
    cluster: str
    mesh: ClusterMesh
    settings: StepSettings
    measure: Measure
    measured: float
    evidence: str
    """Description of how the figures were checked against the source."""
    note: str = ""
    """Assumptions about details that the paper omits."""
    tolerance: float | None = None
    """Relative error that a test allows: the simulation's error, rounded up. None if the run is not reproduced."""

    @property
    def workload(self) -> Workload:
        return transformer(self.name, self.sizes)

    def simulate(self, rates: DeviceEfficiency | None = None) -> StepReport:
        return simulate(self.workload, find_cluster(self.cluster).of(self.mesh.ranks), self.mesh, self.settings, rates)


def gpt(depth: int, width: int, heads: int, length: int = 2048) -> DecoderSizes:
    """Return the sizes of a GPT in Megatron-LM: vocabulary 51,200, dropout, and attention that saves the scores."""
    return DecoderSizes(depth, width, heads, length, 51_200, dropout=True, flash=False)


GPT3 = gpt(96, 12_288, 96)
LLAMA_405B = DecoderSizes(126, 16_384, 128, 8192, 128_256, kv_heads=8, hidden=53_248, gated=True, tied=False)
LLAMA_70B = DecoderSizes(80, 8192, 64, 8192, 128_256, kv_heads=8, hidden=28_672, gated=True, tied=False)

MODELS: Mapping[str, DecoderSizes] = {
    "gpt-1t": gpt(128, 25_600, 160),
    "gpt-530b": gpt(105, 20_480, 128),
    "gpt3-175b": GPT3,
    "llama3-405b": LLAMA_405B,
    "llama3-70b": LLAMA_70B,
}
"""Model sizes by name: GPT-3 (Brown et al. 2020, table 2.1), Narayanan et al. 2021, Llama 3 (2024, table 3)."""


def _runs() -> list[PublishedRun]:
    text = (files("thrifty.simulators.cluster") / "published_runs.toml").read_text(encoding="utf-8")
    return [_run(row, **table) for table in tomllib.loads(text)["table"] for row in table.pop("runs")]


def _run(row: dict[str, Any], sizes: dict[str, Any], settings: dict[str, Any], **about: str) -> PublishedRun:
    depth, width, heads = row.pop("size")
    return PublishedRun(
        sizes=DecoderSizes(depth, width, heads, **sizes),
        mesh=ClusterMesh(**row.pop("mesh")),
        settings=StepSettings(**{**settings, **row.pop("settings")}),
        **about,  # type: ignore[arg-type]
        **row,
    )


RUNS: Mapping[str, PublishedRun] = {run.name: run for run in _runs()}
