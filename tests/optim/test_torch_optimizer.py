"""Transforms as a `torch.optim.Optimizer` in a plain torch training loop."""

import copy

import pytest
import torch
from tiny_runs import plain_run
from torch import nn

from thrifty.core.gradient_transform import chain
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import ScaleBySchedule
from thrifty.techniques.optimizers.adamw import adamw
from thrifty.techniques.optimizers.lion import lion


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_optimizer_trains_in_a_plain_torch_loop() -> None:
    model = network()
    optimizer = TransformOptimizer(model.named_parameters(), adamw(1e-2))
    assert isinstance(optimizer, torch.optim.Optimizer)
    losses = train(model, optimizer, range(200))
    assert losses[-1] < losses[0] / 10


def test_step_returns_loss_of_closure_run_with_gradients() -> None:
    model = network()
    optimizer = TransformOptimizer(model.named_parameters(), lion(1e-3))

    seen = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        seen.append(loss.item())
        return seen[-1]

    before = [parameter.clone() for parameter in model.parameters()]
    assert [optimizer.step(closure)] == seen
    assert all(not torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))


def test_missing_gradient_is_zero_and_frozen_weight_is_skipped() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = TransformOptimizer(model.named_parameters(), lion(1e-1, weight_decay=0.0))
    assert optimizer.names == ["0.bias", "2.weight", "2.bias"]
    before = copy.deepcopy(model.state_dict())
    model[2].bias.grad = torch.ones(1)
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"2.bias"}


def test_learning_rate_is_product_of_all_factors() -> None:
    model = network()
    optimizer = TransformOptimizer(
        model.named_parameters(), chain(adamw(0.5), ScaleBySchedule(lambda step: 0.1 * (step + 1)))
    )
    assert optimizer.learning_rate() == pytest.approx(0.05)
    train(model, optimizer, range(1))
    assert optimizer.learning_rate() == pytest.approx(0.1)


def test_bias_correction_restarts_at_birth_of_state() -> None:
    """After growth, the moments restart while the schedule continues, so that the bias correction must restart too."""
    young, old = network(), network()
    first = TransformOptimizer(young.named_parameters(), adamw(1e-2))
    second = TransformOptimizer(old.named_parameters(), adamw(1e-2))
    second.updates = second.born = 100
    assert train(young, first, range(3)) == train(old, second, range(3))


def test_tied_weights_are_updated_once() -> None:
    model = plain_run(depth=1, tied=True).build()
    optimizer = TransformOptimizer(model.named_parameters(), lion(1e-1, weight_decay=0.0))
    assert "head.weight" not in optimizer.names
    before = model.head.weight.detach().clone()
    model.head.weight.grad = torch.ones_like(before)
    optimizer.step()
    assert torch.equal(model.embedding.token.weight, before - 1e-1)
