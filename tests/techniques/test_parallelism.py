"""Replicate and shard on two real ranks: together they are the single process, alone and with every other technique."""

import pytest
import torch

from parallel_work import STEPS, Run, masks_and_copies, predicted, refusals, train_with_each
from rank_processes import on_ranks
from thrifty import techniques
from thrifty.core.compose import compose
from thrifty.core.errors import Refused, UsageError
from tiny_runs import losses, plain_run, run_through, technique, with_optimizer

STRATEGIES = ("parallelism.replicate", "parallelism.shard")
OTHERS = [name for name in techniques.names() if name not in STRATEGIES]
OWN_DATA = {"data_selection.gradient_norm_sampling", "memory.compress_activations"}
"""Each rank draws by itself, examples or how to round: the same in expectation, not the same numbers."""
LOOSE = {
    "precision.mixed": 3e-3,
    "precision.bfloat16_weights": 3e-3,
    "precision.float8": 1e-2,
    "optimizers.soap": 3e-3,
}
"""Where the last bit of a sum decides more: in 16 bits, and in eigenvectors of what has not been seen yet. In 8 bits
each rank scales the first step by its own share."""


@pytest.fixture(scope="module", params=STRATEGIES)
def together(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Run]]]:
    return request.param, on_ranks(2, train_with_each, request.param, OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_are_the_single_process(together: tuple[str, list[dict[str, Run]]], name: str) -> None:
    strategy, (first, second) = together
    if name not in first:
        with pytest.raises(UsageError, match="cannot go together"):
            compose(plain_run(), with_optimizer([technique(strategy), technique(name)]), STEPS)
        return
    assert (first[name].losses, first[name].norms) == (second[name].losses, second[name].norms)
    assert first[name].tensors == second[name].tensors
    assert (first[name].sharded > 0) == (strategy == "parallelism.shard")
    if name in OWN_DATA:
        return
    torch._dynamo.reset()
    alone, state = run_through(plain_run(tied=name != "optimizers.lion"), with_optimizer([technique(name)]), STEPS)
    loose = LOOSE.get(name, 1e-5)
    assert first[name].losses == pytest.approx(losses(alone), rel=loose)
    assert first[name].norms == pytest.approx([record.gradient_norm for record in alone], rel=30 * loose)
    assert list(first[name].tensors) == list(state.tensors())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_that_cannot_be_shared_equally_is_refused_with_the_next_that_can(strategy: str) -> None:
    for what, fix in on_ranks(2, refusals, strategy):
        assert "an effective batch of 3 examples cannot be shared equally by 2 ranks" in what
        assert fix == "--set data.batch=4"


def test_sharding_one_process_without_a_group_is_refused_with_the_command_that_starts_more() -> None:
    with pytest.raises(Refused, match="there is only one process") as refused:
        compose(plain_run(), with_optimizer([technique("parallelism.shard")]), 2).start()
    assert "torchrun" in refused.value.fix


def test_one_way_to_distribute_at_a_time() -> None:
    with pytest.raises(UsageError, match="both decide the distribution of data"):
        compose(plain_run(), with_optimizer([technique(name) for name in STRATEGIES]), 2)


def test_what_each_rank_holds_and_sends_is_predicted() -> None:
    for before, parameters, optimizer, traffic in on_ranks(2, predicted, "parallelism.shard"):
        assert parameters == before / 2 and optimizer == before
        assert traffic == 3 * before / 2
    for before, parameters, optimizer, traffic in on_ranks(2, predicted, "parallelism.replicate"):
        assert parameters == before and optimizer == 2 * before
        assert traffic == before


def test_masks_do_not_depend_on_sharding_and_a_full_value_is_a_copy() -> None:
    assert on_ranks(2, masks_and_copies) == [(True, True, False)] * 2
