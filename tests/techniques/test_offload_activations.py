"""Activation offloading: bit-identical runs, device memory, and waiting times of the link model."""

import gc
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from offload_work import differences
from rank_processes import on_ranks
from tiny_runs import assert_same, losses, plain_run, run_through, snapshot, technique, with_optimizer
from torch import Tensor

from thrifty.composition.compose import Run, compose
from thrifty.composition.explain import explain
from thrifty.core.errors import RefusedError
from thrifty.memory.host_tier import Where, tier_for
from thrifty.memory.saved_tensor_hooks import use_activation_store
from thrifty.memory.simulated_tier import SimulatedLink, SimulatedTier
from thrifty.techniques.memory.offload_activations import OffloadingStore

TIERS: tuple[Where, ...] = ("disk", "simulated")
EARLY = {"prefetch": 2, "keep_last": 0, "min_elements": 1}
"""Settings that offload nearly all activations of a tiny run."""
OTHERS = [
    [],
    ["memory.recompute"],
    ["precision.mixed"],
    ["large_batch.gradient_accumulation"],
    ["compile"],
    ["attention.tiled"],
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("to", TIERS)
@pytest.mark.parametrize("others", OTHERS, ids=lambda others: " and ".join(others) or "alone")
def test_offloaded_run_is_bit_identical(others: list[str], to: Where) -> None:
    plain, chosen = plain_run(style="gpt", dropout=0.3), with_optimizer([technique(name) for name in others])
    torch._dynamo.reset()
    expected, state = run_through(plain, chosen, 4)
    torch._dynamo.reset()
    tier = tier_for(to, torch.ones(1))
    gc.collect()
    before = replace(tier.account)
    found, offloaded = run_through(plain, [technique("memory.offload_activations", to=to, **EARLY), *chosen], 4)
    assert losses(found) == losses(expected)
    assert_same(snapshot(offloaded), snapshot(state))
    assert tier.account.returned > before.returned and tier.account.now == before.now


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parallelism.shard", "parallelism.replicate"])
def test_offloaded_run_is_bit_identical_on_two_ranks(strategy: str) -> None:
    offload = ("memory.offload_activations", EARLY)
    assert on_ranks(
        2, differences, strategy, offload, [[], ["memory.recompute"], ["large_batch.gradient_accumulation"]]
    ) == [[], []]


def saved_products(store: OffloadingStore, weights: list[Tensor]) -> Tensor:
    """Compute a chain of products, each of which saves its input; the first input is a parameter and stays."""
    x = torch.ones(len(weights[0]), requires_grad=True)
    with use_activation_store(store, smallest=1):
        for weight in weights:
            x = x * weight
    return x.sum()


def chain_of(length: int, size: int = 100) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=True) for _ in range(length)]


def test_all_but_the_last_tensors_cross_the_link_once() -> None:
    tier, weights = SimulatedTier(SimulatedLink()), chain_of(20)
    loss = saved_products(OffloadingStore(tier, prefetch=2, keep_last=5), weights)
    assert tier.account.sent == (19 - 5) * 400  # the first product saves only parameters
    loss.backward()
    assert tier.account.returned == (19 - 5 - 2) * 400  # two were still in transfer
    assert tier.account.now == 0


def test_graph_is_traversed_twice() -> None:
    weights = chain_of(8)
    loss = saved_products(OffloadingStore(SimulatedTier(SimulatedLink()), prefetch=1), weights)
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    plain = saved_products(OffloadingStore(SimulatedTier(SimulatedLink()), keep_last=100), weights)
    for mine, again, expected in zip(first, second, torch.autograd.grad(plain, weights), strict=True):
        assert torch.equal(mine, expected) and torch.equal(again, expected)


def test_forward_pass_without_backward_frees_everything() -> None:
    tier = SimulatedTier(SimulatedLink())
    loss = saved_products(OffloadingStore(tier, prefetch=1), chain_of(8))
    assert tier.account.now > 0
    del loss
    assert tier.account.now == 0
    with torch.no_grad():
        saved_products(OffloadingStore(tier, prefetch=1), chain_of(8))
    assert tier.account.sent == 7 * 400


STAGES = st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1e-2)), min_size=1, max_size=12)
WINDOWS = (st.integers(1, 4), st.integers(0, 3))


def seconds_taken(stages: list[tuple[int, float]], link: SimulatedLink, ahead: int, keep_last: int) -> float:
    """Return simulated seconds of a forward pass and a backward pass twice as long, over stages (bytes, seconds)."""
    tier = SimulatedTier(link)
    store = OffloadingStore(tier, ahead, keep_last)
    saved = []
    for size, seconds in stages:
        tier.clock.compute(seconds)
        saved.append(store.store(torch.empty(size, dtype=torch.uint8)))
    for _, seconds in reversed(stages):
        saved.pop()()
        tier.clock.compute(2 * seconds)
    assert tier.clock.now == pytest.approx(tier.clock.waited + 3 * sum(seconds for _, seconds in stages))
    return tier.clock.now


def seconds_predicted(stages: list[tuple[int, float]], link: SimulatedLink, ahead: int, keep_last: int) -> float:
    """Return the seconds that the link model predicts, from the times at which tensors leave and return."""
    now, line_out, line_back = 0.0, 0.0, 0.0
    gone: list[float] = []
    for place, (_, seconds) in enumerate(stages):
        now += seconds
        if place >= keep_last:
            size = stages[place - keep_last][0]
            line_out = max(line_out, now) + link.latency + size / link.bandwidth
            gone.append(line_out)
        if len(gone) > ahead:
            now = max(now, gone[-1 - ahead])
    left = max(len(gone) - ahead, 0)  # the others are still on the device
    back = [0.0] * left
    next_back = left - 1
    for place in reversed(range(len(stages))):
        while next_back >= max(place - ahead, 0):
            line_back = max(line_back, now, gone[next_back]) + link.latency + stages[next_back][0] / link.bandwidth
            back[next_back] = line_back
            next_back -= 1
        if place < left:
            now = max(now, back[place])
        now += 2 * stages[place][1]
    return now


@given(STAGES, st.floats(1e5, 1e12), st.floats(0, 1e-3), *WINDOWS)
def test_waiting_times_match_the_link_model(
    stages: list[tuple[int, float]], bandwidth: float, latency: float, ahead: int, keep_last: int
) -> None:
    link = SimulatedLink(bandwidth, latency)
    found = seconds_taken(stages, link, ahead, keep_last)
    assert found == pytest.approx(seconds_predicted(stages, link, ahead, keep_last))
    sent = sum(size for size, _ in stages[: max(len(stages) - keep_last - ahead, 0)])
    assert found >= sent / bandwidth  # a lower bound by bandwidth


@given(STAGES, st.floats(1e-3, 1e12), *WINDOWS)
def test_infinite_bandwidth_costs_no_time(
    stages: list[tuple[int, float]], bandwidth: float, ahead: int, keep_last: int
) -> None:
    keeping = 3 * sum(seconds for _, seconds in stages)
    assert seconds_taken(stages, SimulatedLink(bandwidth), ahead, keep_last) >= keeping * (1 - 1e-9)
    assert seconds_taken(stages, SimulatedLink(math.inf), ahead, keep_last) == pytest.approx(keeping)


@pytest.mark.slow
def test_most_activations_leave_the_device() -> None:
    plain = plain_run(batch=8, depth=12)
    settings = {"prefetch": 2, "keep_last": 4}
    run = compose(plain, with_optimizer([technique("memory.offload_activations", **settings)]), 2)
    explanation = explain(run)
    kept = explanation.footprint.activations / explanation.plain.activations
    assert kept < 0.25
    recomputed = compose(plain, with_optimizer([technique("memory.recompute"), *run.techniques[:1]]), 2)
    assert explain(recomputed).footprint.activations < explanation.footprint.activations


def test_host_tier_is_refused_on_cpu() -> None:
    run = Run(plain_run(), (technique("memory.offload_activations", to="host"),), 2)
    with pytest.raises(RefusedError, match="cannot offload to host memory") as refused:
        run.build_model()
    assert 'to="disk"' in refused.value.fix
