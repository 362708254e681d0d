"""Training runs whose speed was published: the model, the mesh it ran on, and what was measured.

Numbers are from the papers' tables; `evidence` says how they were checked. Whatever a paper leaves out and had to be
assumed is said in `note`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from thrifty.simulators.cluster.closed_form_workload import DecoderSizes, transformer
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.device_efficiency import DeviceEfficiency
from thrifty.simulators.cluster.network_topology import find_cluster
from thrifty.simulators.cluster.simulated_step import StepReport, simulate
from thrifty.simulators.cluster.workload import Workload

Measure = Literal["hardware_flops", "model_flops", "mfu", "step_seconds"]
"""What of a report a paper gives: FLOP/s of a device, with what is recomputed or without; the share of its peak
without; or seconds."""


@dataclass(frozen=True)
class PublishedRun:
    """One row of a published table."""

    name: str
    paper: str
    table: str
    sizes: DecoderSizes
    cluster: str
    mesh: ClusterMesh
    settings: StepSettings
    measure: Measure
    measured: float
    tolerance: float | None
    """By what share of it the simulation may be off, checked by a test: what it is off by, rounded up. None where the
    simulation does not describe the run at all."""
    evidence: str
    note: str = ""

    @property
    def workload(self) -> Workload:
        return transformer(self.name, self.sizes)

    def simulate(self, rates: DeviceEfficiency | None = None) -> StepReport:
        return simulate(self.workload, find_cluster(self.cluster).of(self.mesh.ranks), self.mesh, self.settings, rates)


def gpt(depth: int, width: int, heads: int, length: int = 2048) -> DecoderSizes:
    """GPT as Megatron-LM trains it: 51,200 tokens of vocabulary, dropout, attention that keeps its scores."""
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
"""Models by name, apart from any run: GPT-3 (Brown et al. 2020, table 2.1), those of Narayanan et al. 2021, Llama
3 (2024, table 3)."""

_SC21 = "Narayanan et al. 2021, arXiv 2104.04473"
_SECOND_HAND = "table read second-hand; micro-batches and chunks from the authors' scripts (Megatron-LM, examples/sc21)"


Size = tuple[int, int, int]
"""Depth, width, heads."""


def _on_selene(mesh: ClusterMesh, batch: int, micro_batch: int, **how: Any) -> StepSettings:
    """As Megatron-LM runs it on A100: interleaved where a rank has several chunks."""
    schedule = "interleaved" if mesh.chunks > 1 else "1f1b"
    return StepSettings(batch, micro_batch, schedule, number_format="float16", **how)


def _narayanan(
    name: str, size: Size, mesh: ClusterMesh, batch: int, micro_batch: int, measured: float, tolerance: float
) -> PublishedRun:
    """A row of table 1. Gradients overlap with the backward pass where the script takes torch's own data parallel."""
    return PublishedRun(
        f"narayanan-{name}",
        _SC21,
        "table 1",
        gpt(*size),
        "selene-a100",
        mesh,
        _on_selene(mesh, batch, micro_batch, recompute="every", overlap=mesh.pipeline == 1),
        "hardware_flops",
        measured * 1e12,
        tolerance,
        _SECOND_HAND,
    )


def _megatron(name: str, size: Size, ranks: int, tensor: int, measured: float, tolerance: float | None) -> PublishedRun:
    """Shoeybi et al. 2019, weak scaling: 8 examples on each data rank, no accumulation."""
    data = ranks // tensor
    return PublishedRun(
        f"megatron-{name}",
        "Shoeybi et al. 2019, arXiv 1909.08053",
        "section 5.1 and abstract",
        gpt(*size, length=1024),
        "dgx2h-v100",
        ClusterMesh(replicate=data, tensor=tensor),
        StepSettings(8 * data, 8, recompute="every", number_format="float16", fused=False),
        "hardware_flops",
        measured * 1e12,
        tolerance,
        "abstract and table 1 read second-hand",
        "how FLOP were counted is not said: taken with recomputation, as the same group's later papers do; elementwise "
        "operations unfused, which they came to later",
    )


def _korthikanti(
    name: str, size: Size, mesh: ClusterMesh, batch: int, micro_batch: int, mfu: float, tolerance: float
) -> PublishedRun:
    return PublishedRun(
        f"korthikanti-{name}",
        "Korthikanti et al. 2022, arXiv 2205.05198",
        "table 5",
        gpt(*size),
        "selene-a100",
        mesh,
        _on_selene(mesh, batch, micro_batch, recompute="selective", sequence_parallel=True),
        "mfu",
        mfu,
        tolerance,
        "MFU as in Megatron-LM's README; mesh, batch and chunks (table 3) from memory",
    )


def _against_zero(
    ranks: int, mesh: ClusterMesh, micro_batch: int, measured: float, tolerance: float | None
) -> PublishedRun:
    """Table 2: GPT-3's shape at an effective batch of 1536, once with ZeRO-3 and nothing else (DeepSpeed), once without
    (PTD-P)."""
    is_zero = mesh.shard > 1
    note = (
        "not reproduced: simulated, weights come in on all ports of a node at once and behind the products; measured "
        "was about what it takes to bring all of them to every device through its own port (our reading)"
        if is_zero
        else "chunks of 2 blocks assumed, as in the script of figure 18 for the same model and mesh"
    )
    return PublishedRun(
        f"narayanan-175b-{'zero' if is_zero else 'ptdp'}-{ranks}",
        _SC21,
        "table 2",
        GPT3,
        "selene-a100",
        mesh,
        _on_selene(mesh, 1536, micro_batch, recompute="every", zero=3 if is_zero else 0, overlap=is_zero),
        "hardware_flops",
        measured * 1e12,
        tolerance,
        "table read second-hand",
        note,
    )


_MEGATRON_1_0 = PublishedRun(
    "megatron-1.0-1.2b",
    "Megatron-LM 1.0, announcement by its authors (nv-adlr.github.io/MegatronLMV1)",
    "table 1",
    gpt(40, 1536, 16, length=1024),
    "dgx2h-v100",
    ClusterMesh(),
    StepSettings(8, 8, recompute="every", number_format="float16"),
    "step_seconds",
    1.288,
    0.22,
    "read",
    "the same model and machine as megatron-1.2b, operations fused since",
)


def _llama(ranks: int, batch: int, measured: float, tolerance: float | None) -> PublishedRun:
    return PublishedRun(
        f"llama3-405b-{ranks}",
        "Llama Team 2024, arXiv 2407.21783",
        "table 4",
        LLAMA_405B,
        "h100-roce",
        ClusterMesh(shard=ranks // 128, tensor=8, pipeline=16, chunks=8),
        StepSettings(batch, 1, "interleaved", sequence_parallel=True, zero=1, gradient_bytes=4),
        "model_flops",
        measured * 1e12,
        tolerance,
        "table read second-hand",
        "chunks are not published: 8 assumed, one block a stage; gradients assumed to be reduced once a step, in "
        "float32",
    )


RUNS: Mapping[str, PublishedRun] = {
    run.name: run
    for run in (
        _narayanan("1.7b", (24, 2304, 24), ClusterMesh(replicate=32), 512, 16, 137, 0.05),
        _narayanan("3.6b", (30, 3072, 32), ClusterMesh(replicate=32, tensor=2), 512, 16, 138, 0.05),
        _narayanan("7.5b", (36, 4096, 32), ClusterMesh(replicate=32, tensor=4), 512, 16, 142, 0.05),
        _narayanan("18b", (40, 6144, 48), ClusterMesh(replicate=32, tensor=8), 1024, 8, 135, 0.05),
        _narayanan("39b", (48, 8192, 64), ClusterMesh(replicate=32, tensor=8, pipeline=2), 1536, 4, 138, 0.05),
        _narayanan(
            "76b", (60, 10_240, 80), ClusterMesh(replicate=32, tensor=8, pipeline=4, chunks=3), 1792, 2, 140, 0.05
        ),
        _narayanan(
            "145b", (80, 12_288, 96), ClusterMesh(replicate=24, tensor=8, pipeline=8, chunks=2), 2304, 2, 148, 0.05
        ),
        _narayanan(
            "310b", (96, 16_384, 128), ClusterMesh(replicate=15, tensor=8, pipeline=16, chunks=2), 2160, 1, 155, 0.05
        ),
        _narayanan(
            "530b", (105, 20_480, 128), ClusterMesh(replicate=9, tensor=8, pipeline=35, chunks=3), 2520, 1, 163, 0.05
        ),
        _narayanan("1t", (128, 25_600, 160), ClusterMesh(replicate=6, tensor=8, pipeline=64), 3072, 1, 163, 0.05),
        _against_zero(384, ClusterMesh(shard=384), 4, 144, None),
        _against_zero(768, ClusterMesh(shard=768), 2, 88, None),
        _against_zero(1536, ClusterMesh(shard=1536), 1, 44, None),
        _against_zero(384, ClusterMesh(replicate=4, tensor=8, pipeline=12, chunks=4), 1, 153, 0.03),
        _against_zero(768, ClusterMesh(replicate=8, tensor=8, pipeline=12, chunks=4), 1, 149, 0.05),
        _against_zero(1536, ClusterMesh(replicate=16, tensor=8, pipeline=12, chunks=4), 1, 141, 0.08),
        _MEGATRON_1_0,
        _megatron("1.2b", (40, 1536, 16), 1, 1, 39.0, 0.28),
        _megatron("8.3b", (72, 3072, 32), 512, 8, 15_100 / 512, 0.39),
        _korthikanti("22b", (48, 6144, 64), ClusterMesh(tensor=8), 4, 4, 0.415, 0.05),
        _korthikanti("175b", (96, 12_288, 96), ClusterMesh(tensor=8, pipeline=8, chunks=3), 64, 1, 0.514, 0.03),
        _korthikanti("530b", (105, 20_480, 128), ClusterMesh(tensor=8, pipeline=35, chunks=3), 280, 1, 0.560, 0.06),
        _korthikanti("1t", (128, 25_600, 160), ClusterMesh(tensor=8, pipeline=64), 512, 1, 0.563, 0.12),
        _llama(8192, 2048, 430, 0.23),
        _llama(16_384, 2048, 400, 0.22),
    )
}
