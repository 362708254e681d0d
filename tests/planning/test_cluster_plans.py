"""Plans for simulated clusters: all layouts, the fastest layout that fits, and a reason for each technique."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_runs import BATCH, CATALOGUE, plain_techniques, recipe
from tiny_runs import plain_run, technique

from thrifty.composition.compose import compose
from thrifty.core.errors import TYPED, InfeasibleError, RefusedError, UsageError
from thrifty.core.footprint import Footprint
from thrifty.core.technique import Numerics, Technique
from thrifty.distributed.fake_ranks import fake_rank
from thrifty.interface.plans import RecipePlan
from thrifty.planning.cluster_file import read_cluster
from thrifty.planning.cluster_layouts import ClusterLayout, layouts, meshes
from thrifty.planning.cluster_plan import COUNTS, MOST_COUNTS, TOO_MUCH, ClusterPlanner
from thrifty.planning.cost_estimates import OVER_MESH_HIGH, count_footprint
from thrifty.planning.forecast import PlanRequest
from thrifty.simulators.cluster.closed_form_workload import DecoderSizes, transformer
from thrifty.simulators.cluster.network_topology import CLUSTERS, LINKS
from thrifty.simulators.cluster.simulated_step import simulate

BOX = CLUSTERS["h100-box"].of(4)
AGAIN = technique("memory.recompute", every=2)
LARGE = transformer("large", DecoderSizes(4, 1024, 8, 4096, 1000, 512))


def planner(base: Sequence[Technique] = (), **how: Any) -> ClusterPlanner:
    given = {
        "recipe": recipe(*base),
        "plain": plain_run(batch=BATCH),
        "workload": LARGE,
        "cluster": BOX,
        "place": "h100-box",
        "catalogue": CATALOGUE,
        "request": PlanRequest(allow=Numerics.ROUNDING),
        "tokens": 16,
        "steps": 100,
    }
    return ClusterPlanner(**given | how)


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.integers(1, 12))
def test_meshes_use_all_ranks_and_keep_tensor_groups_on_a_node(ranks: int, per_node: int, depth: int) -> None:
    result = [*meshes(ranks, per_node, depth)]
    assert result and len({*result}) == len(result)
    assert all(mesh.ranks == ranks and mesh.tensor <= per_node and mesh.pipeline <= depth for mesh in result)


def test_layouts_are_sorted_by_simulated_time() -> None:
    result = layouts(LARGE, BOX, BATCH, "bfloat16")
    assert {layout.settings.recompute for layout in result} == {"none", "selective", "every"}
    assert {layout.mesh.pipeline for layout in result} == {1, 2, 4}
    for layout in result[:3]:
        assert layout.seconds == simulate(LARGE, BOX, layout.mesh, layout.settings).step_seconds
    fastest = min(layout.seconds for layout in result)
    assert result[0].seconds <= 1.03 * fastest
    alike = [layout for layout in result if layout.seconds <= result[0].seconds]
    assert result[0].changes == min(layout.changes for layout in alike)


def test_plans_use_all_ranks_and_fit_the_memory() -> None:
    plan = planner().plan()
    sizes = {axis: getattr(plan.recipe.mesh, axis) for axis in ("pipeline", "replicate", "shard", "tensor")}
    assert math.prod(sizes.values()) == 4
    with fake_rank(0, sizes):
        memory = count_footprint(compose(plain_run(batch=BATCH), plan.recipe.techniques, 100)).memory
    assert plan.chosen.footprint.memory == memory and memory * OVER_MESH_HIGH <= plan.limit
    steps = [placed.layout.seconds for placed in (plan.chosen, *plan.alternatives)]
    assert len({placed.layout.mesh for placed in (plan.chosen, *plan.alternatives)}) == len(steps) > 1
    assert steps[0] <= 1.03 * min(steps)
    assert plan.as_dict()["simulated"] and plan.step(plan.chosen).low < steps[0] < plan.step(plan.chosen).high
    assert 0 < plan.dominant["time"][1] <= 1


@pytest.mark.parametrize(
    ("nodes", "command"),
    [
        (1, "thrifty train --ranks 4 plan.toml"),
        (2, "torchrun --nnodes 2 --nproc-per-node 2 -m thrifty train plan.toml"),
    ],
)
def test_the_page_and_the_command_of_a_cluster_plan(
    nodes: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TYPED, "1")
    plan = RecipePlan(planner(cluster=replace(BOX, nodes=nodes, per_node=4 // nodes)).plan())
    plan.write("plan.toml")
    page = plan.write_page("plan.html").read_text()
    placed = (plan.plan.chosen, *plan.plan.alternatives)
    assert all(each.layout.label in page for each in placed) and page.count("<figure") == 2
    assert f"All {len(placed)} layouts that fit" in page and "simulated" in page
    assert f"start it with {command}\npage: plan.html" in str(plan)


@pytest.mark.slow
def test_less_memory_per_rank_changes_the_layout() -> None:
    plenty = planner(cluster=BOX.of(2)).plan()
    limit = 0.9 * plenty.chosen.footprint.memory * OVER_MESH_HIGH
    # the simulated model is larger than the counted one, whose limit should decide
    small = transformer("small", DecoderSizes(2, 8, 2, 16, 64, 16))
    tight = planner(
        workload=small, request=PlanRequest(allow=Numerics.ROUNDING, memory=limit), cluster=BOX.of(2)
    ).plan()
    assert tight.chosen.footprint.memory * OVER_MESH_HIGH <= limit
    assert tight.misfits and all("does not fit" in why or "cannot" in why for why in tight.misfits.values())


def test_every_technique_has_a_reason() -> None:
    plan = planner().plan()
    reasons = {reason.technique: reason for reason in plan.reasons}
    assert reasons.keys() == CATALOGUE.keys() and all(reason.why for reason in reasons.values())
    after = {technique.name for technique in plan.recipe.techniques}
    added = {name for name, reason in reasons.items() if reason.verdict == "added"}
    assert added == after - {technique.name for technique in plain_techniques()} and added
    axes = {f"parallelism.{axis}" for axis in ("replicate", "shard", "tensor", "pipeline")}
    assert all("simulated" in reasons[name].why for name in axes - after if "also handles" not in reasons[name].why)
    assert reasons["optimizers.lion"].why == "changes the result; the plan allows only rounding changes"
    assert "not considered" in reasons["memory.offload_activations"].why


@pytest.mark.slow
def test_recompute_of_the_recipe_is_kept() -> None:
    plan = planner([AGAIN]).plan()
    assert AGAIN in plan.recipe.techniques
    assert plan.chosen.layout.settings.recompute == "every"


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="several ranks sum in a different order") as error:
        planner(request=PlanRequest()).plan()
    assert error.value.fix == "--allow rounding"
    with pytest.raises(InfeasibleError, match="no layout fits") as error:
        planner(request=PlanRequest(allow=Numerics.ROUNDING, memory=1e5)).plan()
    assert "--ranks" in error.value.fix
    with pytest.raises(InfeasibleError, match=r"effective batch of 8 cannot be divided over 2,048 ranks") as error:
        planner(cluster=CLUSTERS["h100-roce"].of(2048), workload=replace(LARGE, blocks=LARGE.blocks[:1])).plan()


@pytest.mark.slow
def test_plans_beyond_the_time_limit_are_refused() -> None:
    plan_request = PlanRequest(allow=Numerics.ROUNDING, tokens=1e12, seconds=3600.0)
    with pytest.raises(InfeasibleError, match=r"the fastest candidate that fits takes .*; the limit is 1 h"):
        planner(request=plan_request).plan()
    assert planner(request=replace(plan_request, seconds=1e15)).plan().recipe.budget.tokens == 1e12


def test_exact_plans_keep_micro_batches_on_one_rank() -> None:
    twice = technique("large_batch.gradient_accumulation", micro_batches=2)
    for own in ((), (twice,)):
        plan = planner(own, cluster=BOX.of(1), request=PlanRequest()).plan()
        placed = (plan.chosen, *plan.alternatives)
        assert {each.layout.report.micro_batches for each in placed} == {2 if own else 1}


def test_slower_layouts_are_found_if_fast_ones_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, plain = CLUSTERS["h100-roce"].of(16), plain_run(batch=32)
    result = layouts(LARGE, cluster, 32, "float32")
    held = sorted(layout.report.fullest.total for layout in result)
    limit = OVER_MESH_HIGH * held[len(held) // 20]
    before = itertools.takewhile(lambda layout: OVER_MESH_HIGH * layout.report.fullest.total > limit, result)
    assert sum(layout.report.fullest.total <= TOO_MUCH * limit for layout in before) > COUNTS

    def simulated(self: ClusterPlanner, layout: ClusterLayout, techniques: object) -> Footprint:
        return Footprint(parameters=layout.report.fullest.total)

    monkeypatch.setattr(ClusterPlanner, "_footprint", simulated)
    monkeypatch.setattr(ClusterPlanner, "_techniques", lambda self, layout: ())
    request = PlanRequest(allow=Numerics.ROUNDING, memory=limit)
    placed, misfits = planner(cluster=cluster, plain=plain, request=request)._counted(result)
    assert placed and len(misfits) < MOST_COUNTS
    assert all(each.footprint.memory * OVER_MESH_HIGH <= limit for each in placed)


def test_refusal_of_every_layout_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(self: ClusterPlanner, layout: ClusterLayout, techniques: object) -> Footprint:
        raise RefusedError("a technique: not over a mesh")

    monkeypatch.setattr(ClusterPlanner, "_footprint", refused)
    with pytest.raises(InfeasibleError, match=r"the recipe refuses every layout; .*: a technique: not over a mesh"):
        planner().plan()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "what", "fix"),
    [
        ({"tokens": 16 * BATCH - 1.0}, f"tokens is less than one step of {16 * BATCH}", f"--tokens {16 * BATCH}"),
        ({"seconds": 1e-9}, "1e-09 s is less than one step", "--hours"),
    ],
)
def test_budgets_below_one_step_are_refused_with_a_fix(limits: dict[str, float], what: str, fix: str) -> None:
    with pytest.raises(InfeasibleError, match=what) as error:
        planner(request=PlanRequest(allow=Numerics.ROUNDING, **limits)).plan()
    assert fix in error.value.fix


@pytest.mark.slow
def test_time_and_cost_of_a_budget() -> None:
    plan = planner(request=PlanRequest(allow=Numerics.ROUNDING, tokens=16 * BATCH * 50.0, price=3600.0)).plan()
    assert plan.steps == 50 and plan.recipe.budget.tokens == 16 * BATCH * 50
    assert plan.seconds.value == pytest.approx(50 * plan.chosen.layout.seconds)
    assert plan.cost is not None and plan.cost.value == pytest.approx(plan.seconds.value)


DESCRIBED = """
per_node = 2
nodes = 3
inside = "nvlink4"
[device]
flops = { bfloat16 = 1e15, float32 = 1e14 }
memory = 8e10
bandwidth = 3e12
[between]
latency = 5e-6
bandwidth = 5e10
"""


def test_clusters_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(DESCRIBED)
    read = read_cluster(str(tmp_path / "own.toml"))
    assert read.ranks == 6 and read.inside == LINKS["nvlink4"] and read.between.bandwidth == 5e10
    assert read.device.memory == 8e10 and read.device.rate("bfloat16") == 1e15
    assert read_cluster("h100-box") == CLUSTERS["h100-box"]


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("nodes = 3", "nodes = 0", "nodes is 0"),
        ("nodes = 3", "node = 3", "a cluster has no key 'node'"),
        ("nodes = 3", "", "has no 'nodes'"),
        ('"nvlink4"', '"nvlink9"', "unknown link 'nvlink9'"),
        ("memory = 8e10", "", r"own\.toml.*invalid device: device\.memory is missing"),
        ("memory = 8e10", "memory = nan", r"own\.toml.*device\.memory is nan"),
        ("memory = 8e10", "memory = true", r"own\.toml.*device\.memory is True"),
        ("memory = 8e10", "memory = 8e10\nspeed = 1.0", r"own\.toml.*device has no 'speed'"),
        ("{ bfloat16 = 1e15, float32 = 1e14 }", "{}", r"own\.toml.*device\.flops has no FLOP/s"),
        ("{ bfloat16 = 1e15, float32 = 1e14 }", "2.5", r"own\.toml.*device\.flops is 2\.5, not a table"),
        ("bfloat16 = 1e15", "bfloat16 = -2.5", r"own\.toml.*device\.flops\.bfloat16 is -2\.5"),
        ("bandwidth = 5e10", "bandwidth = inf", r"own\.toml.*between\.bandwidth is inf"),
        ("latency = 5e-6", 'latency = "low"', "invalid link"),
        ("latency = 5e-6", "latency = -1.0", "invalid link"),
        ("bandwidth = 5e10", "bandwidth = 0.0", "invalid link"),
        ("memory = 8e10", "memory = -1.0", "> 0"),
        ("per_node = 2", "per_node =", "cannot be read"),
    ],
)
def test_invalid_cluster_files_are_refused(tmp_path: Path, before: str, after: str, what: str) -> None:
    (tmp_path / "own.toml").write_text(DESCRIBED.replace(before, after))
    with pytest.raises(UsageError, match=what) as error:
        read_cluster(str(tmp_path / "own.toml"))
    assert error.value.fix


def test_unknown_clusters_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="unknown cluster 'h100-bo'") as error:
        read_cluster("h100-bo")
    assert "h100-box" in error.value.fix
