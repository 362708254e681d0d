"""Plans for several ranks of one machine: considered meshes, and the chosen mesh."""

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
from thrifty.training.rank_setup import mesh_sizes


def options(ranks: int, batch: int = BATCH, allow: Numerics = Numerics.ROUNDING) -> Sequence[PlanOption]:
    free, _ = allowed_options(recipe(), plain_run(batch=batch), CATALOGUE, allow, "cpu", ranks)
    return free.get(RANKS, ())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_meshes_use_all_ranks_with_a_technique_per_axis(ranks: int) -> None:
    result = options(ranks)
    assert len({(option.mesh, option.techniques) for option in result}) == len(result) > 3
    for option in result:
        assert option.mesh.least_ranks == ranks
        mesh_sizes(recipe(*option.techniques, mesh=option.mesh), ranks)  # raises if an axis is unused
    meshes = {option.mesh for option in result}
    for axis in ("replicate", "shard", "tensor", "pipeline"):
        assert any(getattr(mesh, axis) == ranks for mesh in meshes)


def test_meshes_divide_the_batch_equally() -> None:
    assert {option.mesh.replicate * option.mesh.shard for option in options(4, batch=6)} == {1, 2}
    parts = [
        t.micro_batches for option in options(2, batch=4) for t in option.techniques if t.name == "parallelism.pipeline"
    ]  # type: ignore[attr-defined]
    assert parts == [2, 4]  # four examples cannot make eight micro-batches


def test_one_rank_and_exact_plans_have_no_rank_options() -> None:
    assert not options(1) and not options(2, allow=Numerics.EXACT)


def halving(run: Run) -> Footprint:
    """Return the footprint per rank if ranks divide a step."""
    result = formula(run)
    names = {technique.name for technique in run.techniques}
    if names & {"parallelism.replicate", "parallelism.tensor", "parallelism.pipeline"}:
        return result.scale(activations=0.5)
    return result.scale(activations=0.5, optimizer=0.5) if "parallelism.shard" in names else result


def over_two(memory: float = inf, gain: float = 0.5) -> PlanSearch:
    """Return a search in which steps on two ranks take `gain` times their expected time."""

    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        result = by_expectation(candidate)
        if candidate.ranks == 1:
            return result
        return replace(result, passes=(gain * result.passes[0],), least=(gain * result.least[0],))

    return searching(memory, ranks=2, count=halving, time=time)


@pytest.mark.slow
def test_faster_ranks_are_used() -> None:
    chosen = over_two().run()
    assert chosen.ranks == 2 and chosen.mesh.replicate == 2
    assert [technique.name for technique in chosen.techniques].count("parallelism.replicate") == 1


@pytest.mark.slow
def test_slower_ranks_are_not_used() -> None:
    search = over_two(gain=2.0)
    assert search.run().options == () and any(candidate.ranks == 2 for candidate in search.tried)


@pytest.mark.slow
def test_models_too_large_for_one_rank_are_divided() -> None:
    search = over_two(memory=500.0)
    chosen = search.run()
    assert chosen.ranks == 2 and chosen.footprint is not None
    assert chosen.footprint.memory * OVER_MESH_HIGH <= 500 * MB


@pytest.mark.slow
def test_ranks_are_probed_with_their_micro_batches() -> None:
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
    return [candidate for candidate in search.combinations() if len(candidate.options) <= 2]


@pytest.mark.slow
def test_impossible_meshes_are_refused() -> None:
    search = searching(inf, ranks=8, count=halving)
    search.look_at_singles()
    deep = [option for option in search.options[RANKS] if option.mesh.pipeline == 8]  # of a model of two blocks
    assert deep and all("blocks" in search.refused[option] for option in deep)
    assert any(option.mesh.replicate == 8 for option in search.singles)


def test_ranks_share_the_memory_of_a_machine() -> None:
    whole = searching(1100.0, ranks=2, count=halving, shared=True)
    whole.run()
    for candidate in whole.tried:
        assert candidate.footprint is not None
        assert candidate.footprint.memory * candidate.counted_high <= whole.processes.room(candidate)
    assert whole.processes.room(PlanCandidate((), (), BATCH)) == 1100 * MB
    (two, *_) = (candidate for candidate in whole.combinations() if candidate.ranks == 2)
    assert whole.processes.room(two) == 550 * MB


@pytest.mark.slow
def test_process_memory_is_separate_by_number_of_ranks() -> None:
    def time(candidate: PlanCandidate, bar: float) -> StepTiming:
        result = by_expectation(candidate)
        return replace(result, memory=result.memory + (300 * MB if candidate.ranks == 1 else 0.0))

    search = searching(1200.0, ranks=2, count=halving, time=time)
    assert search.run().ranks == 2


@pytest.mark.slow
def test_checkpoint_size_does_not_depend_on_ranks() -> None:
    search = over_two(memory=500.0)
    chosen = search.run()
    assert chosen.undivided is not None and chosen.footprint is not None
    assert chosen.undivided.activations > chosen.footprint.activations
    assert chosen.undivided == search.counted(tuple(option for option in chosen.options if option.axis != RANKS))


def test_plans_replace_parallel_techniques() -> None:
    planned = recipe(CATALOGUE["parallelism.shard"](), CATALOGUE["memory.recompute"]())
    assert {technique.name for technique in planned.techniques} - {
        t.name for t in without_rank_techniques(planned.techniques)
    } == {"parallelism.shard"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["parallelism.shard", "parallelism.replicate", "parallelism.pipeline"])
def test_probes_over_ranks_report_the_fullest_rank(name: str) -> None:
    one, other = on_ranks(2, probed, name)
    assert one["rows"] == other["rows"] == (4,) and one["memory"] == other["memory"]
    assert min(one["save"], one["evaluation"], one["update"], *one["passes"]) > 0
