"""Simulated steps: components add up, follow from rates and links, and depend on settings."""

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.simulators.cluster import collective_times
from thrifty.simulators.cluster.closed_form_workload import transformer
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings, cut_stages
from thrifty.simulators.cluster.device_efficiency import DeviceEfficiency, find_efficiency, seconds
from thrifty.simulators.cluster.network_topology import Cluster, find_cluster
from thrifty.simulators.cluster.published_runs import GPT3, MODELS, gpt
from thrifty.simulators.cluster.simulated_step import simulate
from thrifty.simulators.cluster.step_costs import LayoutCosts
from thrifty.simulators.cluster.step_report import StepReport
from thrifty.simulators.cluster.workload import DividedAmount, PassWork, Workload, WorkloadPart

SMALL = transformer("small", gpt(16, 1024, 16))
A100 = find_cluster("selene-a100")
HALF = DeviceEfficiency(products=0.5, attention=0.25, float8=0.5)
NOTHING = WorkloadPart(
    "nothing", DividedAmount(), PassWork(), PassWork(), DividedAmount(), SMALL.blocks[0].entry, is_block=False
)
ONLY_BLOCKS = replace(SMALL, embedding=NOTHING, head=NOTHING, shared=0.0)


def step(
    mesh: ClusterMesh, chosen: StepSettings, workload: Workload = SMALL, rates: DeviceEfficiency | None = None
) -> StepReport:
    return simulate(workload, A100.of(mesh.ranks), mesh, chosen, rates)


def test_a_step_on_one_device_by_formula() -> None:
    rates, device = replace(HALF, memory=0.9, kernel=0.0), A100.device
    report = step(ClusterMesh(), StepSettings(8, 2), rates=rates)
    moved = sum((part.forward.moved + part.backward.moved).total for part in SMALL.parts) * 8
    weights = 2 * 3 * 4 * (sum(part.parameters.total for part in (*SMALL.blocks, SMALL.head)))
    expected = SMALL.model_flops * 8 / (312e12 * 0.5) + (moved + weights) / (device.bandwidth * 0.9)
    assert report.seconds.compute == pytest.approx(expected)
    assert report.seconds.optimizer == pytest.approx(30 * SMALL.parameters / (device.bandwidth * 0.9))
    assert report.step_seconds == report.seconds.compute + report.seconds.optimizer
    assert (
        report.mfu == pytest.approx(SMALL.model_flops * 8 / report.step_seconds / 312e12) and report.mfu == report.hfu
    )
    assert report.tokens_per_second == pytest.approx(8 * 2048 / report.step_seconds)


def test_small_work_is_limited_by_kernel_launches() -> None:
    work = PassWork(DividedAmount(1e3), kernels=20)
    taken = seconds(work, 1, A100.device, HALF, number_format="bfloat16")
    assert taken == pytest.approx(1e-4)
    large = seconds(
        PassWork(DividedAmount(1e15), kernels=20),
        1,
        A100.device,
        HALF,
        number_format="bfloat16",
    )
    assert large == pytest.approx(1e15 / 156e12)


def test_attention_has_its_own_rate_in_16_bits() -> None:
    work = PassWork(DividedAmount(3e15), attention=DividedAmount(1e15))
    device = find_cluster("h100-box").device
    wide, narrow = (seconds(work, 1, device, HALF, number_format=name) for name in ("bfloat16", "float8"))
    assert wide == pytest.approx(2e15 / (0.5 * 989.4e12) + 1e15 / (0.25 * 989.4e12))
    assert narrow == pytest.approx(2e15 / (0.5 * 1978.9e12) + 1e15 / (0.25 * 989.4e12))


def test_every_rate_has_an_interval() -> None:
    report = step(ClusterMesh(), StepSettings(8, 2))
    for name, (low, high) in report.as_dict()["intervals"].items():
        assert low < getattr(report, name) < high


@settings(max_examples=25)
@given(
    pipeline=st.sampled_from([1, 2, 4, 8]),
    parts=st.integers(1, 24),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero_bubble"]),
    tensor=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 4]),
    zero=st.integers(0, 3),
    overlap=st.booleans(),
)
def test_components_of_a_step_are_nonnegative_and_complete(
    pipeline: int, parts: int, schedule: str, tensor: int, data: int, zero: int, overlap: bool
) -> None:
    mesh = ClusterMesh(shard=data, tensor=tensor, pipeline=pipeline)
    report = step(mesh, StepSettings(parts * data, 1, schedule, zero=zero, overlap=overlap))
    pieces = report.seconds
    assert min(vars(pieces).values()) > -1e-12
    busiest = max(report.timeline.busy(rank) for rank in range(pipeline))
    assert pieces.total - pieces.optimizer >= report.timeline.makespan - 1e-12
    assert pieces.compute + pieces.tensor <= busiest + 1e-12
    assert (pieces.tensor > 0) == (tensor > 1)
    assert 0 < report.mfu <= report.hfu < find_efficiency("a100-80gb").products


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pipeline", "parts"), [(2, 1), (4, 4), (4, 16), (8, 32)])
def test_bubble_of_equal_stages_equals_the_formula(schedule: str, pipeline: int, parts: int) -> None:
    """Without transfer times, the bubble is (p - 1)/(m + p - 1) (Huang et al. 2019; Narayanan et al. 2021, 2.2.1)."""
    report = step(ClusterMesh(pipeline=pipeline), StepSettings(parts, 1, schedule), ONLY_BLOCKS)
    idle = report.seconds.bubble / (report.seconds.bubble + report.seconds.compute)
    assert idle == pytest.approx((pipeline - 1) / (parts + pipeline - 1))
    assert report.seconds.transfers > 0


def test_chunks_divide_the_bubble() -> None:
    """The bubble is (p - 1)/(v m) of computing time (Narayanan et al. 2021, section 2.2.2)."""
    for chunks in (1, 2, 4):
        schedule = "interleaved" if chunks > 1 else "1f1b"
        report = step(ClusterMesh(pipeline=4, chunks=chunks), StepSettings(16, 1, schedule), ONLY_BLOCKS)
        assert report.seconds.bubble / report.seconds.compute == pytest.approx(3 / chunks / 16)


def test_weight_gradients_fill_the_bubble() -> None:
    """ZB-H1 waits (p - 1)(F + I - W) seconds with the same work (Qi et al. 2023, table 2)."""
    mesh, chosen = ClusterMesh(pipeline=4), StepSettings(16, 1, "zero_bubble")
    filled, plain = step(mesh, chosen, ONLY_BLOCKS).seconds, step(mesh, StepSettings(16), ONLY_BLOCKS).seconds
    actions = LayoutCosts(A100.of(4), mesh, chosen, find_efficiency("a100-80gb")).actions(cut_stages(ONLY_BLOCKS, 4)[1])
    forward, inputs, weights = (actions[kind].total for kind in "FIW")
    assert filled.bubble == pytest.approx(3 * (forward + inputs - weights)) and filled.bubble < plain.bubble
    assert filled.compute == pytest.approx(plain.compute) == pytest.approx(16 * (forward + inputs + weights))


def test_an_expensive_head_enlarges_the_bubble() -> None:
    """The stage with the vocabulary projection delays all stages by more than the formula."""
    mesh, chosen = ClusterMesh(pipeline=4), StepSettings(16)
    assert step(mesh, chosen).timeline.bubble > 1.3 * step(mesh, chosen, ONLY_BLOCKS).timeline.bubble


def test_tensor_collectives_per_block() -> None:
    """A block has four all-reduces of the hidden states, six with recompute; embedding and head have one each (Shoeybi
    et al. 2019, section 3)."""
    mesh, group = ClusterMesh(tensor=8), A100.of(8).group(8, 1)
    each = collective_times.seconds("all_reduce", SMALL.blocks[0].entry * 4, group)
    plain = step(mesh, StepSettings(8, 4)).seconds.tensor
    again = step(mesh, StepSettings(8, 4, recompute="every")).seconds.tensor
    assert plain == pytest.approx(2 * each * (4 * 16 + 2)) and again == pytest.approx(2 * each * (6 * 16 + 2))


def test_sequence_parallelism_reduces_compute_and_memory() -> None:
    mesh = ClusterMesh(tensor=8)
    plain, divided = (step(mesh, StepSettings(8, 4, sequence_parallel=on)) for on in (False, True))
    assert divided.seconds.tensor == pytest.approx(plain.seconds.tensor, rel=0.1)
    assert divided.seconds.compute < plain.seconds.compute
    assert divided.fullest.activations < plain.fullest.activations


def test_data_collectives_overlap_with_the_backward_pass() -> None:
    mesh = ClusterMesh(replicate=64)
    hidden, seen = (step(mesh, StepSettings(64, overlap=on)).seconds for on in (True, False))
    reduced = collective_times.seconds("all_reduce", 2 * SMALL.parameters, mesh.groups(slowed(64))["data"])
    assert seen.data == pytest.approx(reduced) and 0 <= hidden.data < seen.data
    assert hidden.compute == seen.compute


def slowed(ranks: int) -> Cluster:
    cluster = A100.of(ranks)
    return replace(cluster, between=replace(cluster.between, bandwidth=cluster.between.bandwidth * HALF.links))


def test_zero_3_gathers_each_part_for_each_pass() -> None:
    mesh = ClusterMesh(shard=64)
    group = mesh.groups(slowed(64))["shard"]
    each = [
        2 * collective_times.seconds("all_gather", 2 * part.parameters.total, group)
        + collective_times.seconds("reduce_scatter", 2 * part.parameters.total, group)
        for part in SMALL.parts
    ]
    report = step(mesh, StepSettings(128, 1, zero=3, overlap=False))
    assert report.seconds.data == pytest.approx(2 * sum(each))
    assert step(mesh, StepSettings(128, 1, zero=3)).seconds.data < 0.5 * report.seconds.data


def test_zero_1_sends_as_much_as_data_parallelism() -> None:
    """Both send 2 Psi (Rajbhandari et al. 2020, section 7)."""
    plain = step(ClusterMesh(replicate=64), StepSettings(64, overlap=False)).seconds
    divided = step(ClusterMesh(shard=64), StepSettings(64, zero=1, overlap=False)).seconds
    assert divided.data == pytest.approx(plain.data, rel=0.05)
    assert divided.optimizer == pytest.approx(plain.optimizer / 64)


def test_hybrid_sharding_reduces_shards_between_replicas() -> None:
    inside = step(ClusterMesh(replicate=8, shard=8), StepSettings(64, zero=1, overlap=False))
    everywhere = step(ClusterMesh(shard=64), StepSettings(64, zero=1, overlap=False))
    assert inside.seconds.data != everywhere.seconds.data
    assert inside.fullest.state.total > everywhere.fullest.state.total


def test_unfused_operations_take_longer() -> None:
    """Fusion raised the 175B model from 113 to 135 TFLOP/s (Narayanan et al. 2021, section 5.8)."""
    fused, unfused = (step(ClusterMesh(), StepSettings(4, 4, fused=on)).seconds.compute for on in (True, False))
    assert 1.02 < unfused / fused < 1.6


@settings(max_examples=20)
@given(factor=st.floats(1.1, 100.0), what=st.sampled_from(["inside", "between"]))
def test_a_faster_network_is_never_slower(factor: float, what: str) -> None:
    mesh, chosen = ClusterMesh(replicate=2, tensor=8, pipeline=4), StepSettings(32, overlap=False)
    cluster = A100.of(64)
    link = getattr(cluster, what)
    faster = replace(cluster, **{what: replace(link, bandwidth=link.bandwidth * factor)})
    assert (
        simulate(SMALL, faster, mesh, chosen).step_seconds
        <= simulate(SMALL, cluster, mesh, chosen).step_seconds + 1e-12
    )


def test_throughput_scales_with_replicas() -> None:
    few, many = (step(ClusterMesh(replicate=n), StepSettings(4 * n, 4)) for n in (8, 256))
    assert many.tokens_per_second == pytest.approx(32 * few.tokens_per_second, rel=0.1)


def test_stages_are_as_even_as_blocks_allow() -> None:
    def counts(depth: int, stages: int) -> list[int]:
        result = cut_stages(transformer("", gpt(depth, 64, 2)), stages)
        assert result[0].parts[0].name == "embedding" and result[-1].parts[-1].name == "head"
        return [sum(part.is_block for part in stage.parts) for stage in result]

    assert counts(12, 4) == [3, 3, 3, 3]
    assert counts(126, 16) == [7, *[8] * 14, 7]  # Llama 3, section 3.3.2
    assert counts(126, 128)[:2] == [0, 1]
    assert counts(13, 4) in ([3, 4, 3, 3], [3, 3, 4, 3])
    with pytest.raises(InfeasibleError, match="12 blocks cannot make 13 stages"):
        counts(12, 13)


@pytest.mark.parametrize(
    ("mesh", "chosen", "message"),
    [
        (ClusterMesh(tensor=4), StepSettings(8), "the mesh has 4 ranks, but the cluster has 8"),
        (ClusterMesh(replicate=8), StepSettings(12), "12 examples do not divide"),
        (ClusterMesh(pipeline=8), StepSettings(8, schedule="1f2b"), "unknown pipeline schedule"),
        (ClusterMesh(pipeline=4, chunks=2, tensor=2), StepSettings(6, schedule="interleaved"), "multiple"),
        (ClusterMesh(replicate=8), StepSettings(8, number_format="float8"), "no rate for 'float8'"),
    ],
)
def test_incompatible_sizes_are_refused(mesh: ClusterMesh, chosen: StepSettings, message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        simulate(SMALL, A100.of(8), mesh, chosen)
    assert error.value.fix


def test_empty_axes_are_refused() -> None:
    with pytest.raises(UsageError, match="tensor is 0"):
        ClusterMesh(tensor=0)


def test_reports_are_plain_data() -> None:
    report = step(ClusterMesh(tensor=2, pipeline=4), StepSettings(8))
    result = json.loads(json.dumps(report.as_dict()))
    assert result["step_seconds"] == pytest.approx(sum(result["seconds"].values())) and len(result["memory"]) == 4
    assert result["mesh"]["ranks"] == 8 and result["settings"]["schedule"] == "1f1b"


@pytest.mark.parametrize(
    ("model", "cluster", "mesh", "batch"),
    [
        ("llama3-70b", "h100-box", ClusterMesh(shard=8), 8),
        ("gpt3-175b", "selene-a100", ClusterMesh(replicate=16, tensor=8, pipeline=8), 1536),
        ("gpt-1t", "h100-roce", ClusterMesh(replicate=32, tensor=8, pipeline=64), 6144),
    ],
)
def test_large_runs_are_simulated_in_seconds(model: str, cluster: str, mesh: ClusterMesh, batch: int) -> None:
    began = time.process_time()
    workload = transformer(model, MODELS[model])
    report = simulate(
        workload, find_cluster(cluster).of(mesh.ranks), mesh, StepSettings(batch, zero=3 if mesh.shard > 1 else 0)
    )
    assert time.process_time() - began < 10
    assert 0.2 < report.mfu < 0.7


def test_parameters_of_named_models() -> None:
    assert transformer("", GPT3).parameters == pytest.approx(175e9, rel=0.01)
    assert transformer("", MODELS["llama3-405b"]).parameters == pytest.approx(405e9, rel=0.01)
    assert transformer("", MODELS["llama3-70b"]).parameters == pytest.approx(70.6e9, rel=0.01)
