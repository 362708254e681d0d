"""Optimizer offloading: bit-identical runs with any optimizer, and delayed updates against a reference."""

import copy
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from offload_work import differences, differences_of_slices, refusal
from rank_processes import on_ranks
from tiny_runs import (
    advance,
    assert_same,
    corpus,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
    tiny_model,
    with_optimizer,
)
from torch import Tensor, nn

import thrifty
from thrifty import techniques
from thrifty.composition.compose import BaseRun, compose
from thrifty.composition.explain import explain
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.gradient_transform import chain
from thrifty.core.technique import Numerics
from thrifty.data.text.token_windows import PackedTokens
from thrifty.memory.host_tier import Where, tier_for
from thrifty.memory.simulated_tier import SimulatedTier
from thrifty.objectives.next_token import NextToken
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import ClipByGlobalNorm, scale_by_learning_rate
from thrifty.techniques.memory import offload_optimizer
from thrifty.techniques.memory.offload_optimizer import HostCopyUpdate, OffloadOptimizer, offloaded, tiles
from thrifty.techniques.optimizers.adamw import adamw

TIERS: tuple[Where, ...] = ("disk", "simulated")
ACTING = [name for name in techniques.names() if name.startswith(("optimizers.", "sparsity.", "precision."))]
ACTING += ["growth.stacking", "averaging.ema", "averaging.latest"]
"""Techniques that change parameters, have state, or change the structure."""
DELAYED = {"to": "simulated", "delay": True, "after": 2}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("to", TIERS)
@pytest.mark.parametrize("name", ACTING)
def test_offloaded_run_is_bit_identical(name: str, to: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_optimizer, "TILE", 3000)
    plain = plain_run(style="gpt", dropout=0.3)
    others = {"gradients.clip", "large_batch.gradient_accumulation"} - {name}
    chosen = with_optimizer([technique(each) for each in (name, *sorted(others))])
    expected, state = run_through(plain, chosen, 5)
    found, offloaded = run_through(plain, [technique("memory.offload_optimizer", to=to), *chosen], 5)
    assert losses(found) == losses(expected)
    assert_same(snapshot(offloaded), snapshot(state))
    assert offloaded.optimizer is not None
    site = offloaded.optimizer.site
    assert len(site.tiles) > 2 if isinstance(site, HostCopyUpdate) else to == "disk"


@pytest.mark.slow
def test_offloaded_run_is_bit_identical_under_compile() -> None:
    chosen = with_optimizer([technique("compile")])
    runs = []
    for more in ([], [technique("memory.offload_optimizer"), technique("memory.offload_activations")]):
        torch._dynamo.reset()
        runs.append(run_through(plain_run(style="gpt", dropout=0.3), [*more, *chosen], 4))
    assert losses(runs[0][0]) == losses(runs[1][0])
    assert_same(snapshot(runs[0][1]), snapshot(runs[1][1]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parallelism.shard", "parallelism.replicate"])
@pytest.mark.parametrize("to", TIERS)
def test_offloaded_run_is_bit_identical_on_two_ranks(strategy: str, to: Where) -> None:
    others = [["gradients.clip", "large_batch.gradient_accumulation"], ["optimizers.lamb"]]
    offload = ("memory.offload_optimizer", {"to": to})
    assert on_ranks(2, differences, strategy, offload, others) == [[], []]


@pytest.mark.slow
def test_host_copies_keep_the_order_of_rows() -> None:
    """Queries, keys and values of a layer are divided separately over ranks, and are separate layers for Muon and LAMB.
    SOAP and moving masks use whole layers."""
    others = {
        "optimizers.muon": {"slices": True},
        "optimizers.lamb": {"slices": True},
        "optimizers.soap": {},
        "sparsity.set": {"every": 1},
        "sparsity.rigl": {"every": 1},
    }
    assert on_ranks(2, differences_of_slices, ["simulated", "disk"], others) == [[]] * 2


def test_changed_parameters_are_copied_to_the_host() -> None:
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(8, 8))
    second = nn.Parameter(first.detach().clone())
    pair = [(first, adamw(0.1)), (second, offloaded(adamw(0.1), "simulated"))]
    made = [(parameter, TransformOptimizer([("w", parameter)], transform)) for parameter, transform in pair]
    for step in range(6):
        for parameter, optimizer in made:
            if step == 3:
                with torch.no_grad():
                    parameter.mul_(0.5)
            parameter.grad = parameter.detach() + step
            optimizer.step()
    assert torch.equal(first, second)


def test_state_leaves_the_device_and_is_in_checkpoints() -> None:
    chosen = with_optimizer([technique("memory.offload_optimizer")])
    run = compose(plain_run(), chosen, 2)
    explanation = explain(run)
    assert explanation.footprint.optimizer == 0
    state = run.start()
    slots = [tensor for name, tensor in state.tensors().items() if name.startswith("optimizer/")]
    assert sum(tensor.nbytes for tensor in slots) == 2 * explanation.footprint.parameters


def test_tiles_cover_all_parameters() -> None:
    assert tiles([5, 5, 5, 20, 1], elements=10) == [[0, 1], [2, 3], [4]]
    assert tiles([5, 5], elements=10) == [[0, 1]]
    assert tiles([7], elements=100) == [[0]]


def test_gradients_and_values_cross_the_link_once() -> None:
    weight = nn.Parameter(torch.randn(100, 10))
    tier = tier_for("simulated", weight)
    assert isinstance(tier, SimulatedTier)
    optimizer = TransformOptimizer([("w", weight)], offloaded(chain(ClipByGlobalNorm(1.0), adamw(0.1)), "simulated"))
    assert isinstance(optimizer.site, HostCopyUpdate) and not optimizer.site.head_remembers
    for _ in range(3):
        sent, returned, waited = tier.account.sent, tier.account.returned, tier.clock.waited
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert (tier.account.sent - sent, tier.account.returned - returned) == (weight.nbytes, weight.nbytes)
        assert tier.clock.waited > waited


def delayed_adam(start: Tensor, gradient: Callable[[Tensor], Tensor], rate: float, after: int, steps: int) -> Tensor:
    """Run torch's Adam with each gradient, from step `after` on, used one step later."""
    parameter = nn.Parameter(start.clone())
    adam = torch.optim.Adam([parameter], lr=rate, betas=(0.9, 0.999))
    pending = None
    for step in range(steps):
        found = gradient(parameter.detach())
        parameter.grad = found if step < after else pending
        if parameter.grad is not None:
            adam.step()
        pending = found if step >= after else None
    return parameter.detach()


@pytest.mark.parametrize(("after", "rate"), [(40, 0.03), (40, 0.1), (0, 0.03), (1000, 0.03)])
def test_delayed_update_is_adam_with_previous_gradients(after: int, rate: float) -> None:
    torch.manual_seed(0)
    start, curvature = torch.randn(20), torch.logspace(0, -1, 20)
    weight = nn.Parameter(start.clone())
    transform = offloaded(adamw(rate, (0.9, 0.999), weight_decay=0.0), "simulated", delayed_after=after)
    optimizer = TransformOptimizer([("w", weight)], transform)
    for _ in range(200):
        weight.grad = curvature * weight.detach()
        optimizer.step()
    expected = delayed_adam(start, lambda w: curvature * w, rate, after, 200)
    assert torch.allclose(weight, expected, rtol=1e-3, atol=1e-6)
    if rate == 0.03:  # larger rates oscillate, in the reference too
        assert float((curvature * weight.detach() ** 2).sum()) < 1e-4 * float((curvature * start**2).sum())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize("other", ["gradients.clip", "growth.stacking", "sparsity.rigl", "optimizers.schedule_free"])
def test_delayed_run_resumes_exactly(other: str, saved: int) -> None:
    chosen = with_optimizer([technique("memory.offload_optimizer", **DELAYED), technique(other)])
    run = compose(plain_run(), chosen, 6)
    state = run.start()
    advance(run, state, saved)
    kept = snapshot(state)
    assert any(name.startswith("optimizer/next/") for name in kept.tensors)
    advance(run, state)
    again = compose(plain_run(), chosen, 6)
    resumed = restored(again, kept)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))


def test_first_delayed_update_is_one_step_late() -> None:
    chosen = with_optimizer([technique("memory.offload_optimizer", **DELAYED)])
    weights = []
    run = compose(plain_run(), chosen, 5)
    state = run.start()
    for step in range(5):
        advance(run, state, step + 1)
        weights.append(snapshot(state).tensors["parameters/blocks.0.mlp.down.weight"])
    moved = [not torch.equal(old, new) for old, new in pairwise(weights)]
    assert moved == [True, False, True, True]


def test_only_a_delay_changes_the_numerics() -> None:
    assert technique("memory.offload_optimizer").numerics is Numerics.EXACT
    assert technique("memory.offload_optimizer", **DELAYED).numerics is Numerics.DIFFERENT


@pytest.mark.slow
def test_language_model_learns_with_a_delay() -> None:
    ends = []
    for delay in (False, True):
        plain = BaseRun(tiny_model, PackedTokens(corpus(), 16, 16, seed=0), NextToken())
        offload = technique("memory.offload_optimizer", to="simulated", delay=delay, after=40)
        records, _ = run_through(plain, [offload, technique("optimizers.adamw", lr=1e-3)], 150)
        ends.append(statistics.mean(losses(records)[-20:]))
    assert ends[1] == pytest.approx(ends[0], rel=0.05) and ends[1] < 4.0


def test_unknown_tier_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="offload_optimizer: to is 'dsik'") as refused:
        OffloadOptimizer(to="dsik")  # type: ignore[arg-type]
    assert "disk" in refused.value.fix
    optimizer = offloaded(scale_by_learning_rate(0.1), to="dsik")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown tier 'dsik'"):
        TransformOptimizer([("weight", torch.nn.Parameter(torch.ones(2)))], optimizer)


def test_delay_is_refused_on_disk() -> None:
    chosen = with_optimizer([technique("memory.offload_optimizer", to="disk", delay=True)])
    with pytest.raises(RefusedError, match="a delay saves no time") as refused:
        compose(plain_run(), chosen, 2).start()
    assert "delay=false" in refused.value.fix


def test_delayed_update_with_communication_is_refused() -> None:
    offload = ("memory.offload_optimizer", DELAYED)
    found = on_ranks(2, refusal, "parallelism.shard", offload, "optimizers.lamb")
    assert all("cannot communicate with other ranks" in what for what in found)


def test_host_tier_is_refused_on_cpu() -> None:
    with pytest.raises(RefusedError, match="trains on the CPU") as refused:
        compose(plain_run(), with_optimizer([technique("memory.offload_optimizer", to="host")]), 2).start()
    assert 'to="disk"' in refused.value.fix


CHANGING = [
    ("growth.stacking", {"moments": "copy"}), ("growth.stacking", {"moments": "mean"}), ("growth.compound", {}),
    ("growth.auto_grow", {}), ("growth.layer_drop", {}), ("sparsity.gradual", {}), ("sparsity.snip", {}),
    ("sparsity.grasp", {}), ("sparsity.rigl", {}), ("sparsity.set", {}), ("sparsity.early_bird", {}),
    ("sparsity.n_of_m", {}), ("sparsity.static", {}), ("attention.dota", {}), ("averaging.ema", {}),
    ("curriculum.sequence_length", {}), ("optimizers.schedule_free", {}), ("precision.optimizer_state", {}),
]  # fmt: skip


@pytest.mark.sampled(9)
@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize(("name", "settings"), CHANGING)
def test_delay_combines_with_growth_and_masks(name: str, settings: dict[str, Any], after: int) -> None:
    delayed = technique("memory.offload_optimizer", **DELAYED | {"after": after})
    chosen = with_optimizer([technique(name, **settings), delayed])
    try:
        run = compose(plain_run(), chosen, 6)
        state = run.start()
    except UsageError as refused:
        assert refused.fix
        return
    advance(run, state, 3)
    saved = snapshot(state)
    advance(run, state)
    run.verify(state)
    again = compose(plain_run(), chosen, 6)
    resumed = restored(again, saved)
    again.verify(resumed)
    advance(again, resumed)
    assert_same(snapshot(resumed), snapshot(state))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Make a step in which one weight may lack a gradient."""
    for index, parameter in enumerate(model.parameters()):
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index))
        parameter.grad = None if step == 4 and index == 2 else gradient
    optimizer.step()


def test_a_delayed_update_ends_before_its_state_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_move(self: HostCopyUpdate, *work: Any, move: Callable = HostCopyUpdate.move) -> None:
        time.sleep(0.05)
        move(self, *work)

    monkeypatch.setattr(HostCopyUpdate, "move", slow_move)
    weights = []
    for is_joined in (False, True):
        model = layers()
        optimizer = thrifty.apply(thrifty.optim.AdamW(model), "offload_optimizer", to="simulated", delay=True, after=1)
        for step in range(6):
            step_by_hand(model, optimizer, step)
            if is_joined:
                optimizer.site.join()
        state = copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.site.join()
        torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("to", TIERS)
def test_masked_copies_follow_a_missing_gradient(to: Where) -> None:
    weights = []
    for is_offloaded in (False, True):
        model = layers()
        pair = model, thrifty.optim.AdamW(model)
        chosen = [("set", {"every": 2, "until": 8}), ("offload_optimizer", {"to": to})]
        for name, settings in chosen[: 1 + is_offloaded]:
            pair = thrifty.apply(pair, name, **settings)
        for step in range(7):
            step_by_hand(*pair, step)
        weights.append([parameter.detach() for parameter in model.parameters()])
    assert all(map(torch.equal, *weights))
