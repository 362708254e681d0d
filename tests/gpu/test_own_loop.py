"""Techniques and optimizers in the user's own training loop, on a GPU."""

import math

import pytest
import torch
from gpu_only import GPU, on_a_gpu
from tiny_runs import plain_run, technique

import thrifty
from thrifty import techniques
from thrifty.core.claims import Claim
from thrifty.core.errors import ThriftyError
from thrifty.interface.optimizers import optimizer_named, optimizer_names

pytestmark = on_a_gpu
STEPS = 4


def losses(optimizer: str, name: str = "") -> list[float]:
    plain = plain_run(depth=4, style="gpt")
    model = plain.build().to(GPU).train()
    own_optimizer = optimizer_named(optimizer)(model, total_steps=STEPS)
    if name:
        chosen = technique(name)
        batch = {"batch": plain.source.batch} if name == "large_batch.scale_learning_rate" else {}
        thrifty.apply((model, own_optimizer), chosen, total_steps=STEPS, **batch)
    values = []
    for step in range(STEPS):
        batch = plain.source.at(step).to(GPU)
        loss = (plain.objective.losses(plain.objective.predict(model, batch), batch) * batch.weight).sum()
        loss.backward()
        own_optimizer.step()
        own_optimizer.zero_grad()
        values.append(loss.item())
    state = own_optimizer.state_dict()
    own_optimizer.load_state_dict(state)
    return values


@pytest.mark.parametrize("name", optimizer_names())
def test_each_optimizer_steps_and_is_restored(name: str) -> None:
    assert all(map(math.isfinite, losses(name)))


@pytest.mark.parametrize(
    "name", [name for name in techniques.own_names() if Claim.OPTIMIZER not in techniques.find(name).claims]
)
def test_each_technique_is_applied_or_refused_with_a_fix(name: str) -> None:
    try:
        values = losses("AdamW", name)
    except ThriftyError as refused:
        assert refused.fix
        return
    assert all(map(math.isfinite, values))


def test_activation_budget_lowers_the_peak_on_a_gpu() -> None:
    model = plain_run(depth=4, style="gpt").build().to(GPU)
    tokens = torch.randint(200, (64, 16), device=GPU)

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(tokens).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    with thrifty.activation_budget(model, "30%"):
        peak()
        less = peak()
    assert less < peak()
