"""Memory of each rank: ZeRO's table, activations over a schedule, and runs that exceed the device."""

import pytest

from thrifty.core.errors import UsageError
from thrifty.simulators.cluster.closed_form_workload import transformer
from thrifty.simulators.cluster.cluster_mesh import ClusterMesh, StepSettings
from thrifty.simulators.cluster.network_topology import find_cluster
from thrifty.simulators.cluster.published_runs import GPT3, MODELS, gpt
from thrifty.simulators.cluster.rank_memory import state_bytes
from thrifty.simulators.cluster.simulated_step import simulate
from thrifty.simulators.cluster.step_report import StepReport

SMALL = transformer("small", gpt(16, 1024, 16))


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_bytes_of_rajbhandari_2020_figure_1(zero: int, gigabytes: float) -> None:
    assert state_bytes(7.5e9, zero, 64).total / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_zero_2_bytes_of_the_paper_and_of_deepspeed() -> None:
    assert state_bytes(7.5e9, 2, 64, gradient=6).total / 1e9 == pytest.approx(17.1, abs=0.05)
    assert state_bytes(7.5e9, 2, 64).total == pytest.approx(7.5e9 * (2 + 14 / 64))


def test_unknown_zero_stages_are_refused() -> None:
    with pytest.raises(UsageError, match="no stage 4"):
        state_bytes(1.0, 4)


def small(schedule: str, parts: int, **settings: object) -> StepReport:
    mesh = ClusterMesh(tensor=2, pipeline=4)
    return simulate(SMALL, find_cluster("selene-a100").of(8), mesh, StepSettings(parts, 1, schedule, **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", [12] * 4), ("1f1b", [4, 3, 2, 1])])
def test_activations_equal_the_live_micro_batches(schedule: str, most: list[int]) -> None:
    """GPipe holds m per rank, 1F1B at most p (Huang et al. 2019; Narayanan et al. 2021, section 2.2)."""
    report = small(schedule, 12)
    for rank, times in enumerate(most):
        assert report.memory[rank].activations == pytest.approx(times * report.stage_bytes[rank])


def test_activation_curve_ends_at_zero_and_has_the_peak() -> None:
    report = small("1f1b", 12)
    curve = report.activations(0)
    assert curve[0][1] == report.stage_bytes[0] and curve[-1][1] == 0
    assert max(size for _, size in curve) == report.memory[0].activations
    assert [time for time, _ in curve] == sorted(time for time, _ in curve)


def test_activations_of_a_stage_sum_over_its_parts() -> None:
    block = SMALL.blocks[0]
    kept = 4 * block.saved.per_rank(2)
    plain, every = small("1f1b", 12), small("1f1b", 12, recompute="every")
    assert plain.stage_bytes[1] == pytest.approx(kept) and plain.memory[1].temporary == 0
    assert every.stage_bytes[1] == 4 * block.entry
    assert every.memory[1].temporary == pytest.approx(block.saved.per_rank(2) - block.entry)
    assert every.fullest.total < plain.fullest.total


def test_states_of_all_ranks_sum_to_the_whole_model() -> None:
    """A tied embedding is on the first and the last stage, and non-matrix parameters on each tensor rank."""
    report = small("1f1b", 12)
    total = 2 * sum(rank.state.total for rank in report.memory)
    small_ones = sum(part.parameters.whole for part in SMALL.parts)
    assert total == pytest.approx(16 * (SMALL.parameters + SMALL.shared + small_ones))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sharded_state_equals_the_formula(zero: int) -> None:
    cluster, mesh = find_cluster("selene-a100").of(64), ClusterMesh(shard=64)
    report = simulate(SMALL, cluster, mesh, StepSettings(64, zero=zero))
    assert report.memory[0].state == state_bytes(SMALL.parameters, zero, 64)
    assert (report.memory[0].temporary > 0) == (zero == 3)


def test_runs_that_exceed_memory_are_flagged() -> None:
    """175B parameters fit 64 A100 of 80 GB only with full recompute (Narayanan et al. 2021, section 5.6)."""
    workload, cluster, mesh = (
        transformer("gpt3", GPT3),
        find_cluster("selene-a100").of(64),
        ClusterMesh(tensor=8, pipeline=8),
    )
    fits = simulate(workload, cluster, mesh, StepSettings(64, recompute="every"))
    assert fits.fits and fits.fullest.total < 80 * 2**30
    too_much = simulate(workload, cluster, mesh, StepSettings(64))
    assert not too_much.fits and too_much.fullest.total > too_much.fullest.limit == 80 * 2**30


def test_70b_needs_sharding_on_eight_devices() -> None:
    workload, cluster = transformer("70b", MODELS["llama3-70b"]), find_cluster("h100-box")
    plain = simulate(workload, cluster, ClusterMesh(tensor=8), StepSettings(8, recompute="every"))
    assert not plain.fits and plain.fullest.state.total == pytest.approx(16 * workload.parameters / 8, rel=0.01)
