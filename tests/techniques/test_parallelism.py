"""Replicate and shard on two real ranks: equal to one process, with every other technique."""

from dataclasses import replace
from functools import cache

import pytest
from parallel_work import (
    STEPS,
    Run,
    alone,
    masks_and_copies,
    plain_with,
    predicted,
    refusals,
    train_with_each,
    trained_with_batch_norm,
)
from rank_processes import on_ranks
from table_samples import sample_of, whole_tables
from tiny_runs import plain_run, technique, with_optimizer
from worker_results import computed_once

from thrifty import techniques
from thrifty.composition.compose import compose
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.technique import Technique

CLAIMING = ("parallelism.replicate", "parallelism.shard")
SUMMED = technique("large_batch.gradient_accumulation")
STRATEGIES: dict[str, list[Technique]] = {
    "replicate": [technique("parallelism.replicate")],
    "shard": [technique("parallelism.shard")],
    "shard zero=1, accumulated": [technique("parallelism.shard", zero=1), SUMMED],
    "shard zero=2, accumulated": [technique("parallelism.shard", zero=2), SUMMED],
}
OTHERS = [name for name in techniques.names() if name not in CLAIMING]
TOUCHY = [
    "adapters.lora",
    "data_selection.gradient_norm_sampling",
    "growth.stacking",
    "measure.noise_scale",
    "memory.compress_activations",
    "memory.offload_activations",
    "memory.recompute",
    "optimizers.lars",
    "precision.mixed",
    "precision.optimizer_state",
    "sparsity.n_of_m",
    "sparsity.rigl",
]
"""Techniques that read gradients, parameters or saved tensors while these may be whole."""
OWN_DATA = {"data_selection.gradient_norm_sampling", "memory.compress_activations"}
"""Techniques with separate random values on each rank (examples, rounding): equal in expectation only."""
LOOSE = {
    "attention.dota": 3e-3,
    "precision.mixed": 3e-3,
    "precision.bfloat16_weights": 3e-3,
    "precision.float8": 1e-2,
    "precision.optimizer_state": 1e-4,
    "optimizers.soap": 3e-3,
}
"""Tolerances of techniques that amplify last bits: chosen keys, 16 or 8 bits, and eigenvectors of null directions. In
float8 each rank scales the first step by its own examples."""


@cache
def together(strategy: str) -> list[dict[str, Run]]:
    return computed_once(
        f"parallelism, {strategy}", lambda: on_ranks(2, train_with_each, STRATEGIES[strategy], goes_with(strategy))
    )


def goes_with(strategy: str) -> list[str]:
    return OTHERS if whole_tables() and SUMMED not in STRATEGIES[strategy] else sample_of(TOUCHY, 5)


@pytest.mark.parametrize(("strategy", "name"), [(s, name) for s in STRATEGIES for name in goes_with(s)])
def test_two_ranks_equal_one_process(strategy: str, name: str) -> None:
    first, second = together(strategy)
    if name not in first:
        with pytest.raises(UsageError, match="cannot be combined"):
            compose(plain_with(name), with_optimizer([*STRATEGIES[strategy], technique(name)]), STEPS)
        return
    assert (first[name].losses, first[name].norms) == (second[name].losses, second[name].norms)
    assert first[name].tensors == second[name].tensors
    assert (first[name].sharded > 0) == (strategy != "replicate")
    if name in OWN_DATA:
        return
    single, loose = alone(name, *STRATEGIES[strategy][1:]), LOOSE.get(name, 1e-5)
    assert first[name].losses == pytest.approx(single.losses, rel=loose)
    assert first[name].evaluated == second[name].evaluated == pytest.approx(single.evaluated, rel=loose)
    assert first[name].norms == pytest.approx(single.norms, rel=30 * loose)
    assert list(first[name].tensors) == list(single.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", CLAIMING)
def test_order_of_names_does_not_matter(strategy: str) -> None:
    first, second = on_ranks(2, train_with_each, [technique(strategy)], OTHERS, strangers=True)
    assert first.keys() == second.keys() and len(first) > len(OTHERS) / 2
    for name, run in first.items():  # one rank holds all of a parameter with one row
        assert replace(run, sharded=0) == replace(second[name], sharded=0), name


@pytest.mark.parametrize("strategy", CLAIMING)
def test_ranks_have_equal_batch_norm_statistics(strategy: str) -> None:
    first, second = on_ranks(2, trained_with_batch_norm, strategy)
    assert "buffers/blocks.0.norm.running_var" in first.tensors
    assert (first.tensors, first.evaluated) == (second.tensors, second.evaluated)


@pytest.mark.parametrize("strategy", CLAIMING)
def test_indivisible_batch_names_the_next_size(strategy: str) -> None:
    for what, fix in on_ranks(2, refusals, strategy):
        assert "an effective batch of 3 examples cannot be divided equally among 2 ranks" in what
        assert fix == "--set data.batch=4"


def test_sharding_in_one_process_is_refused() -> None:
    with pytest.raises(RefusedError, match="requires several processes") as refused:
        compose(plain_run(), with_optimizer([technique("parallelism.shard")]), 2).start()
    assert "torchrun" in refused.value.fix


def test_two_data_parallel_techniques_are_refused() -> None:
    with pytest.raises(UsageError, match="both decide the data parallelism"):
        compose(plain_run(), with_optimizer([technique(name) for name in CLAIMING]), 2)


@pytest.mark.slow
def test_memory_and_traffic_are_predicted() -> None:
    settings = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 2, "gather_dtype": "bfloat16"}]
    strategies = [technique("parallelism.replicate"), *(technique("parallelism.shard", **each) for each in settings)]
    for replicate, *sharded in on_ranks(2, predicted, strategies):
        before, after = replicate
        whole, block, share = before.parameters, before.block, after
        assert 0 < before.outside < whole == before.gradients and whole == before.outside + 4 * before.block
        assert (after.parameters, after.gradients, after.optimizer) == (whole, whole, 2 * whole)
        assert after.traffic == whole
        assert before.activations / 2 < share.activations < before.activations and before.peak / 2 < share.peak
        in_a_block = (share.inside + share.peak) / 2 + before.outside + 3.5 * block
        peaks = [share.peak + whole, share.peak + whole, in_a_block, share.peak + whole / 2]
        for zero, (_, after), peak in zip((1, 2, 3, 2), sharded, peaks, strict=True):
            assert (after.parameters, after.optimizer) == (whole / 2, whole)
            assert after.gradients == (whole if zero == 1 else whole / 2)
            assert after.peak == peak
        assert [after.traffic for _, after in sharded] == [whole, whole, (3 * whole - before.outside) / 2, 0.75 * whole]


def test_masks_are_independent_of_sharding() -> None:
    assert on_ranks(2, masks_and_copies) == [(True, True, False)] * 2
