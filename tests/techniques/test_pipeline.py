"""Pipelines on real ranks: every schedule equals one process; memory and traffic."""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel_work import digests
from pipeline_work import Case, Found, footprints, found, most_alive, on_mesh, resumed, save_after, sent_and_buffered
from rank_processes import on_ranks
from table_samples import sample_of
from technique_runs import RUNS
from tiny_runs import advance, snapshot, tiny_model
from torch import nn
from worker_results import computed_once

from thrifty import techniques
from thrifty.core.errors import RefusedError
from thrifty.distributed.model_partition import balanced_partition, partition_model
from thrifty.techniques.parallelism import pipeline
from thrifty.techniques.parallelism.pipeline import stage_places
from thrifty.training import checkpoint

NAME = "parallelism.pipeline"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
LAMB = {
    "optimizers.lamb": {"lr": 1e-2},
    "gradients.clip": {"max_norm": 0.5},
    "large_batch.gradient_accumulation": {"micro_batches": 2},
}


def piped(others: Mapping[str, Mapping[str, Any]] = LAMB, **settings: Any) -> dict[str, Mapping[str, Any]]:
    """Return the pipeline with counted costs, together with other techniques."""
    return {NAME: {"cost_source": "counted"} | settings, **others}


EXACT = {
    **{f"{schedule}, tied": Case(piped(schedule=schedule), {"batch": 6, "style": "gpt"}, 20) for schedule in SCHEDULES},
    **{f"{schedule}, free": Case(piped(schedule=schedule), {"batch": 6, "tied": False}, 20) for schedule in SCHEDULES},
    "one micro-batch": Case(piped({}, schedule="gpipe", micro_batches=1)),
    "blocks given": Case(piped({}, blocks=(1, 3))),
    "more micro-batches than rows": Case(piped({}, micro_batches=6)),
    "gpipe, recomputed": Case(piped({}, schedule="gpipe", recompute=True)),
    "zbv, recomputed": Case(piped({}, schedule="zbv", recompute=True)),
    "1f1b, blocks recomputed by another": Case(piped({"memory.recompute": {}})),
    "conversations in a row": Case(piped({}), data="conversations"),
    "conversations in a row, zbv": Case(piped({}, schedule="zbv"), data="conversations"),
    "a growing model": Case(piped({"growth.stacking": {"at": (2,), "moments": "copy"}}), steps=4),
    "longer and longer texts": Case(piped({"curriculum.sequence_length": {"start": 8, "until": 2, "phases": 2}})),
    "masks that move": Case(piped({"sparsity.rigl": {"every": 2, "density": 0.5}}), steps=5),
    "masks chosen over all stages": Case(piped({"sparsity.snip": {"density": 0.3}}), steps=3),
    "a llama of transformers": Case(piped({}), {"theirs": "llama"}),
    "a gpt2 of transformers": Case(piped({}, schedule="interleaved"), {"theirs": "gpt2"}),
}
TWO_STAGES = {name: EXACT[name] for name in sample_of(EXACT, 4)}
FOUR = {
    "four stages, gpipe": Case(piped(schedule="gpipe"), {"batch": 6}, 20),
    "four stages, 1f1b": Case(piped(schedule="1f1b"), {"batch": 6, "tied": False}, 20),
    "four stages, zero bubble": Case(piped(schedule="zero_bubble"), {"batch": 6, "depth": 8}, 20),
    "four stages, zbv": Case(piped(schedule="zbv"), {"batch": 6, "depth": 8}, 20),
}
REPLICATED = {
    "two stages, twice": Case(piped(LAMB | {"parallelism.replicate": {}}), {"batch": 8}, 20),
    "two stages, twice, zbv": Case(piped(LAMB | {"parallelism.replicate": {}}, schedule="zbv"), {"batch": 8}, 20),
}


STATE = {"parallelism.shard": {"zero": 1}}
DIVIDED = {
    "free": Case(piped(LAMB | STATE), {"batch": 8, "tied": False}, 20),
    "tied": Case(piped(LAMB | STATE), {"batch": 8}, 20),
    "in halves": Case(piped(STATE, schedule="zbv"), {"batch": 8}),
}


SPLIT = {
    "tied": Case(piped(LAMB | {"parallelism.tensor": {}}), {"batch": 8, "style": "gpt"}, 20),
    "free, zbv": Case(piped(LAMB | {"parallelism.tensor": {}}, schedule="zbv"), {"batch": 8, "tied": False}, 20),
    "along tokens": Case(piped(LAMB | {"parallelism.tensor": {"sequence_parallel": True}}), {"batch": 8}, 20),
}
ALL_AT_ONCE = {
    "replicate": Case(piped(LAMB | {"parallelism.tensor": {}, "parallelism.replicate": {}}), {"batch": 8}, 20),
    "shard": Case(piped(LAMB | {"parallelism.tensor": {}, "parallelism.shard": {"zero": 1}}), {"batch": 8}, 20),
}
"""Technique by mesh axis, in addition to pipeline and tensor."""


@cache
def split() -> dict[str, list[Found]]:
    return on_mesh_once("split", SPLIT, {"pipeline": 2, "tensor": 2})


@pytest.fixture(scope="module")
def divided() -> dict[str, list[Found]]:
    return on_mesh_once("divided", DIVIDED, {"pipeline": 2, "shard": 2})


@pytest.fixture(scope="module")
def two() -> dict[str, list[Found]]:
    return on_mesh_once("two_stages", TWO_STAGES, {"pipeline": 2})


@cache
def four() -> dict[str, list[Found]]:
    return on_mesh_once("four", FOUR, {"pipeline": 4})


@cache
def two_by_two() -> dict[str, list[Found]]:
    return on_mesh_once("replicated", REPLICATED, {"pipeline": 2, "replicate": 2})


def on_mesh_once(key: str, cases: Mapping[str, Case], mesh: Mapping[str, int]) -> dict[str, list[Found]]:
    """Return the results of each rank of a mesh, by case."""

    def ranks() -> list[Sequence[Found]]:
        return on_ranks(math.prod(mesh.values()), on_mesh, mesh, list(cases.values()))

    found_by_rank = computed_once(f"pipeline, {key}", ranks)
    return {name: [rank[index] for rank in found_by_rank] for index, name in enumerate(cases)}


def assert_the_single_process(ranks: Sequence[Found], case: Case, tolerance: float = 1e-10) -> None:
    alone = found(case.without(*(name for name in case.techniques if name.startswith("parallelism."))))
    assert not any(rank.refused for rank in ranks), ranks[0].refused
    for rank in ranks:
        assert rank.losses == pytest.approx(alone.losses, rel=tolerance, abs=0)
        assert rank.held_out == pytest.approx(alone.held_out, rel=tolerance, abs=0)
        assert rank.norms == pytest.approx(alone.norms, rel=1e-6)  # records are float32
        assert rank.losses == ranks[0].losses and rank.norms == ranks[0].norms
    assert set().union(*(rank.tensors for rank in ranks)) == alone.tensors.keys()
    for rank in ranks:
        for name, tensor in rank.tensors.items():
            np.testing.assert_allclose(tensor, alone.tensors[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", TWO_STAGES)
def test_two_stages_equal_one_process(two: dict[str, list[Found]], name: str) -> None:
    assert_the_single_process(two[name], TWO_STAGES[name])
    first, second = (rank.tensors.keys() for rank in two[name])
    assert first and second and not first & second  # a tied head is on the first stage only


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_stages_equal_one_process(name: str) -> None:
    assert_the_single_process(four()[name], FOUR[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ("free", "tied"))
def test_stages_combine_with_sharded_state(divided: dict[str, list[Found]], name: str) -> None:
    assert_the_single_process(divided[name], DIVIDED[name])


@pytest.mark.slow
def test_split_backward_and_sharding_are_refused(divided: dict[str, list[Found]]) -> None:
    assert all("cannot be combined" in rank.refused for rank in divided["in halves"])


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICATED)
def test_replicated_pipelines_equal_one_process(name: str) -> None:
    assert_the_single_process(two_by_two()[name], REPLICATED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_stages_with_tensor_parallelism_equal_one_process(name: str) -> None:
    assert_the_single_process(split()[name], SPLIT[name])


@pytest.mark.slow
@pytest.mark.parametrize("beside", ALL_AT_ONCE)
def test_eight_ranks_on_three_axes_equal_one_process(beside: str) -> None:
    sizes = {"pipeline": 2, "tensor": 2, beside: 2}
    ranks = on_ranks(8, on_mesh, sizes, [ALL_AT_ONCE[beside]])
    assert_the_single_process([rank[0] for rank in ranks], ALL_AT_ONCE[beside])


@pytest.mark.slow
def test_recomputed_stages_repeat_dropout() -> None:
    model = {"style": "gpt", "dropout": 0.3}
    cases = [
        Case(piped({}, schedule=schedule, recompute=again), model)
        for schedule in ("gpipe", "zbv")
        for again in (False, True)
    ]
    for kept, again, kept_v, again_v in on_ranks(2, on_mesh, {"pipeline": 2}, cases):
        for one, other in ((kept, again), (kept_v, again_v)):
            assert one.losses == other.losses
            assert all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_overflow_on_one_stage_skips_on_all() -> None:
    mixed = {"precision.mixed": {"format": "float16", "init_scale": 2.0**18}}
    case = Case(piped(mixed), {"tied": False}, steps=8, double=False)
    first, second = (rank[0] for rank in on_ranks(2, on_mesh, {"pipeline": 2}, [case]))
    assert any(first.skipped) and not all(first.skipped)
    assert first.skipped == second.skipped and first.losses == second.losses


def test_alive_micro_batches_match_the_schedule() -> None:
    parts = {"gpipe": 4, "1f1b": 4, "interleaved": 4, "zero_bubble": 4, "zbv": 4}
    cases = [Case(piped({}, schedule=schedule, micro_batches=count), {"batch": 8}) for schedule, count in parts.items()]
    again = Case(piped({}, schedule="gpipe", recompute=True), {"batch": 8})
    first, second = on_ranks(2, most_alive, [*cases, again])
    gpipe, one_each, interleaved, zero_bubble, zbv, recomputed = range(6)
    assert first[gpipe] == [4, 4] and second[gpipe] == [4, 4]  # m
    assert first[one_each] == [2, 2] and second[one_each] == [1, 1]  # p - i at stage i
    assert max(first[recomputed] + second[recomputed]) <= 2  # the kept micro-batch and a recomputed one
    for index, schedule in ((interleaved, "interleaved"), (zero_bubble, "zero_bubble"), (zbv, "zbv")):
        most = max(sum(first[index]), sum(second[index]))
        assert (
            most / 2 >= pipeline.most_alive(schedule, 2, 4, 2) >= most / 3
        )  # peaks of both stages, at different times


def test_checkpoint_resumes_with_other_numbers_of_stages(tmp_path: Path) -> None:
    case = Case(piped(), {"batch": 6}, steps=9)
    alone = case.without(NAME)
    expected = found(alone)
    on_ranks(2, save_after, case, 3, tmp_path, 2)
    run, state = resumed(alone, tmp_path)
    assert digests(snapshot(state).tensors) == digests(checkpoint.load(tmp_path).tensors)
    advance(run, state, 6)
    checkpoint.save(tmp_path, state.step, state.tensors(), state.scalars())
    written = digests(snapshot(state).tensors)
    read = on_ranks(4, save_after, case, 9, tmp_path, 4, True)
    assert {name: digest for rank in read for name, digest in rank.items()} == written
    assert sum(map(len, read)) == len(written)
    for name, tensor in checkpoint.load(tmp_path).tensors.items():
        np.testing.assert_allclose(tensor.double().numpy(), expected.tensors[name], rtol=0, atol=1e-10, err_msg=name)


OTHERS = sample_of((name for name in techniques.names() if not name.startswith("parallelism.") and name not in RUNS), 8)
REFUSED = {
    "adapters.intrinsic_dimension": "belongs to all blocks",
    "adapters.prefix_tuning": "belongs to all blocks",
    "adapters.prompt_tuning": "rank 1 of the pipeline has no parameter to train",
    "attention.dota": "does not know the loss of detectors",
    "attention.elsa": "the whole model is calibrated in one pass",
    "attention.sanger": "the whole model is calibrated in one pass",
    "attention.spatten": "importance in earlier blocks is unknown on another rank",
    "attention.vitcod": "the whole model is calibrated in one pass",
    "data_selection.gradient_norm_sampling": "cannot be combined",
    "growth.auto_grow": "no stage of a pipeline has all blocks",
    "growth.compound": "cannot fill 2 stages",
    "growth.stacking": "cannot fill 2 stages",
    "memory.activation_budget": "cannot be combined",
    "memory.share_parameters": "would be on different ranks",
    "sparsity.dynamic_heads": "one rank must know the heads of all blocks",
    "sparsity.early_bird": "a ticket covers all blocks",
    "sparsity.grasp": "first derivatives only",
}
LOOSE = {
    "memory.compress_activations": 1e-2,
    "optimizers.soap": 3e-3,
    "precision.mixed": 3e-3,
    "precision.bfloat16_weights": 3e-3,
    "precision.float8": 1e-2,
}
"""Techniques that round micro-batches separately, or amplify the last bit of a sum."""


@pytest.fixture(scope="module")
def with_each() -> dict[str, list[Found]]:
    return on_mesh_once("with_each", WITH_EACH, {"pipeline": 2})


WITH_EACH = {
    name: Case(piped({name: {}}, micro_batches=2), {"tied": name != "optimizers.lion"}, double=False) for name in OTHERS
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_techniques_combine_or_are_refused(with_each: dict[str, list[Found]], name: str) -> None:
    first, second = with_each[name]
    assert (name in REFUSED) == bool(first.refused) == bool(second.refused), first.refused
    assert REFUSED.get(name, "") in first.refused
    if name not in REFUSED:
        alone = found(WITH_EACH[name].without(NAME))
        assert first.losses == second.losses == pytest.approx(alone.losses, rel=LOOSE.get(name, 1e-5))
        assert first.tensors.keys() | second.tensors.keys() == alone.tensors.keys()


def test_blocks_are_divided_by_cost() -> None:
    assert balanced_partition([0, 1, 1, 1, 1, 0], 2) == [2, 2]
    assert balanced_partition([0, 1, 1, 1, 1, 2], 2) == [3, 1]
    assert balanced_partition([2, 1, 1, 1, 1, 1, 1, 0], 2) == [2, 4]
    assert balanced_partition([0, *[1] * 8, 9], 4) == [2, 2, 3, 1]
    with pytest.raises(RefusedError, match="3 blocks cannot fill 4 stages"):
        balanced_partition([0, 1, 1, 1, 0], 4)


@pytest.mark.parametrize("timed", [True, False])
def test_stage_with_expensive_head_has_fewer_blocks(timed: bool) -> None:
    model = tiny_model(depth=8)
    model.head = nn.Linear(32, 200_000, bias=False)  # much more expensive, since a shared machine measures times
    parts = partition_model(model, timed)
    assert (parts.stack, parts.front, parts.back) == ("blocks", ("embedding.token",), ("norm", "head"))
    assert len(set(parts.costs[1:-1])) == 1  # equal blocks have equal costs
    first, last = balanced_partition(parts.costs, 2)
    assert first > last


def test_stage_order_is_cyclic_or_a_v() -> None:
    assert stage_places("1f1b", 3, 1) == [0, 1, 2]
    assert stage_places("interleaved", 2, 3) == [0, 1, 0, 1, 0, 1]
    assert stage_places("zbv", 3, 2) == [0, 1, 2, 2, 1, 0]


@pytest.mark.slow
def test_memory_is_predicted() -> None:
    cases = [Case(piped({}), double=False), Case(piped({}, blocks=(1, 3), schedule="gpipe"), double=False)]
    for (plain, even), (_, uneven) in on_ranks(2, footprints, cases):
        assert even.parameters == pytest.approx(plain.outside + 2 * plain.block)
        assert uneven.parameters == pytest.approx(plain.outside + 3 * plain.block)
        assert even.gradients == even.parameters and even.optimizer == 2 * even.parameters
        # half of the blocks, two micro-batches of four; position tables do not depend on the examples
        assert even.activations == pytest.approx(plain.saved / 2 * 2 / 4, rel=0.03)
        # all micro-batches on both ranks, and the loss on the last
        assert uneven.activations > plain.saved * 3 / 4


@pytest.mark.slow
def test_traffic_and_buffers_are_predicted() -> None:
    names = ("gpipe", "1f1b", "interleaved", "zbv")
    cases = [Case(piped({}, schedule=name), {"tied": False}, double=False) for name in names]
    measured = on_ranks(2, sent_and_buffered, cases)
    for index, (name, (plain, predicted)) in enumerate(zip(names, on_ranks(2, footprints, cases)[0], strict=True)):
        sent, held = (max(values) for values in zip(*(rank[index] for rank in measured), strict=True))
        assert sent == predicted.traffic > 0, name
        # torch still holds the last micro-batch, and with zbv hidden states between stages of the rank
        besides = plain.hidden / 4 + (plain.hidden if name == "zbv" else 0)
        assert held == pytest.approx(predicted.buffers + besides, rel=0.01), name


def test_processes_refuse_invalid_settings_alike() -> None:
    cases = [
        Case(piped({}, micro_batches=1)),
        Case(piped({}, schedule="interleaved", micro_batches=5), {"depth": 8}),
        Case(piped({}, schedule="zbv"), {"depth": 3}),
        Case(piped({}, blocks=(1, 2))),
        Case(piped({"memory.recompute": {}}, recompute=True)),
        Case(piped({"memory.share_parameters": {}})),
    ]
    first, second = on_ranks(2, on_mesh, {"pipeline": 2}, cases)
    words = [
        "1f1b requires at least as many micro-batches",
        "equal rounds",
        "3 blocks cannot fill 4 stages",
        "blocks [1, 2] do not divide",
    ]
    words += ["both decide the recomputation", "cannot be combined"]
    for mine, theirs, word in zip(first, second, words, strict=True):
        assert word in mine.refused and mine.refused == theirs.refused
