"""Plans for several ranks of one machine: which meshes are looked at, and when one of them is taken."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest
from parallel_work import probed
from planned_runs import BATCH, CATALOGUE, MB, by_expectation, formula, recipe, searching
from rank_processes import on_ranks
from tiny_runs import plain_run

from thrifty.composition.compose import Run
from thrifty.core.footprint import Footprint
from thrifty.core.technique import Numerics
from thrifty.planning.cost_estimates import OVER_MESH_HIGH, StepTiming
from thrifty.planning.plan_candidate import PlanCandidate
from thrifty.planning.plan_search import PlanSearch
from thrifty.planning.planner import allowed_options
from thrifty.planning.rank_options import RANKS, without_rank_techniques
from thrifty.planning.search_space import PlanOption
from thrifty.training.run_setup import mesh_sizes


def ways(ranks: int, batch: int = BATCH, allow: Numerics = Numerics.ROUNDING) -> Sequence[PlanOption]:
    free, _ = allowed_options(recipe(), plain_run(batch=batch), CATALOGUE, allow, "cpu", ranks)
    return free.get(RANKS, ())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_mesh_uses_all_ranks_and_has_a_technique_for_each_axis(ranks: int) -> None:
    found = ways(ranks)
    assert len({(way.mesh, way.techniques) for way in found}) == len(found) > 3
    for way in found:
        assert way.mesh.least_ranks == ranks
        mesh_sizes(recipe(*way.techniques, mesh=way.mesh), ranks)  # raises where an axis is left unused
    meshes = {way.mesh for way in found}
    for axis in ("replicate", "shard", "tensor", "pipeline"):
        assert any(getattr(mesh, axis) == ranks for mesh in meshes)


def test_only_meshes_that_share_a_batch_equally_are_looked_at() -> None:
    assert {way.mesh.replicate * way.mesh.shard for way in ways(4, batch=6)} == {1, 2}
    parts = [t.micro_batches for way in ways(2, batch=4) for t in way.techniques if t.name == "parallelism.pipeline"]  # type: ignore[attr-defined]
    assert parts == [2, 4]  # eight micro-batches of four examples there are none


def test_one_rank_has_no_such_ways_and_what_must_be_exact_has_none_either() -> None:
    assert not ways(1) and not ways(2, allow=Numerics.EXACT)


def halving(run: Run) -> Footprint:
    """Of a rank, where ranks divide a step."""
    found = formula(run)
    names = {technique.name for technique in run.techniques}
    if names & {"parallelism.replicate", "parallelism.tensor", "parallelism.pipeline"}:
        return found.scale(activations=0.5)
    return found.scale(activations=0.5, optimizer=0.5) if "parallelism.shard" in names else found


def over_two(memory: float = inf, gain: float = 0.5) -> PlanSearch:
    """A search in which two ranks take so much of the time that is expected of them."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        found = by_expectation(candidate)
        if candidate.ranks == 1:
            return found
        return replace(found, passes=(gain * found.passes[0],), least=(gain * found.least[0],))

    return searching(memory, ranks=2, count=halving, time=time)


@pytest.mark.slow
def test_ranks_are_taken_where_they_are_measured_to_be_faster() -> None:
    chosen = over_two().run()
    assert chosen.ranks == 2 and chosen.mesh.replicate == 2
    assert [technique.name for technique in chosen.techniques].count("parallelism.replicate") == 1


@pytest.mark.slow
def test_one_rank_stays_alone_where_several_are_no_faster() -> None:
    search = over_two(gain=2.0)
    assert search.run().ways == () and any(candidate.ranks == 2 for candidate in search.tried)


@pytest.mark.slow
def test_what_does_not_fit_one_rank_is_divided_and_has_the_room_that_meshes_need() -> None:
    search = over_two(memory=500.0)
    chosen = search.run()
    assert chosen.ranks == 2 and chosen.footprint is not None
    assert chosen.footprint.memory * OVER_MESH_HIGH <= 500 * MB


@pytest.mark.slow
def test_the_steps_of_ranks_are_run_in_the_micro_batches_that_they_will_have() -> None:
    search = over_two()
    cut = [candidate for candidate in search_candidates(search) if candidate.parts == 2 and candidate.ranks == 2]
    whole = [candidate for candidate in search_candidates(search) if candidate.parts == 1 and candidate.ranks == 2]
    assert search.kind(cut[0]) not in {search.kind(candidate) for candidate in whole}
    alone = [candidate for candidate in search_candidates(search) if candidate.ranks == 1]
    kinds = {search.kind(candidate) for candidate in alone if candidate.parts == 1}
    assert all(search.kind(candidate) in kinds for candidate in alone)


def search_candidates(search: PlanSearch) -> list[PlanCandidate]:
    if not search.singles:
        search.look_at_singles()
    return [candidate for candidate in search.combinations() if len(candidate.ways) <= 2]


@pytest.mark.slow
def test_what_no_technique_can_build_over_a_mesh_is_refused_and_not_counted() -> None:
    search = searching(inf, ranks=8, count=halving)
    search.look_at_singles()
    deep = [way for way in search.ways[RANKS] if way.mesh.pipeline == 8]  # of a model of two blocks
    assert deep and all("blocks" in search.refused[way] for way in deep)
    assert any(way.mesh.replicate == 8 for way in search.singles)


def test_memory_of_one_machine_is_shared_by_its_ranks_and_one_of_them_alone_has_it_all() -> None:
    whole = searching(1100.0, ranks=2, count=halving, shared=True)
    whole.run()
    for candidate in whole.tried:
        assert candidate.footprint is not None
        assert candidate.footprint.memory * candidate.counted_high <= whole.room(candidate)
    assert whole.room(PlanCandidate((), (), BATCH)) == 1100 * MB
    (two, *_) = (candidate for candidate in whole.combinations() if candidate.ranks == 2)
    assert whole.room(two) == 550 * MB


@pytest.mark.slow
def test_what_one_process_held_beside_its_tensors_says_nothing_of_ranks() -> None:
    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        found = by_expectation(candidate)
        return replace(found, memory=found.memory + (300 * MB if candidate.ranks == 1 else 0.0))

    search = searching(1200.0, ranks=2, count=halving, time=time)
    assert search.run().ranks == 2


@pytest.mark.slow
def test_checkpoints_of_ranks_are_as_large_as_those_of_one() -> None:
    search = over_two(memory=500.0)
    chosen = search.run()
    assert chosen.undivided is not None and chosen.footprint is not None
    assert chosen.undivided.activations > chosen.footprint.activations
    assert chosen.undivided == search.counted(tuple(way for way in chosen.ways if way.axis != RANKS))


def test_techniques_that_divide_the_work_are_for_the_plan_to_choose() -> None:
    planned = recipe(CATALOGUE["parallelism.shard"](), CATALOGUE["memory.recompute"]())
    assert {technique.name for technique in planned.techniques} - {
        t.name for t in without_rank_techniques(planned.techniques)
    } == {"parallelism.shard"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["parallelism.shard", "parallelism.replicate", "parallelism.pipeline"])
def test_a_probe_over_ranks_ends_on_all_of_them_and_tells_what_the_fullest_held(name: str) -> None:
    one, other = on_ranks(2, probed, name)
    assert one["rows"] == other["rows"] == (4,) and one["memory"] == other["memory"]
    assert min(one["save"], one["evaluation"], one["update"], *one["passes"]) > 0
