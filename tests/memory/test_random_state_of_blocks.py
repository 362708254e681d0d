"""Recomputed blocks with random numbers of Python, NumPy and torch sample the same values again."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from recompute_work import equal
from torch import Tensor, nn

import thrifty
from thrifty.core.randomness import start_draws

WIDTH = 16
INPUTS = torch.linspace(-1, 1, 8 * 12 * WIDTH).view(8, 12, WIDTH)


class DrawingBlock(nn.Module):
    """A residual block with stochastic depth by Python, noise by NumPy and dropout by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.from_numpy(np.random.standard_normal(4 * WIDTH)).float()
        hidden = F.dropout(F.gelu(self.inner(inputs)) * noise, 0.3)
        return inputs + random.random() * self.outer(hidden)


class DrawingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DrawingBlock() for _ in range(5))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def drawing_model() -> nn.Module:
    torch.manual_seed(0)
    return DrawingModel()


def gradients(model: nn.Module) -> list[Tensor | None]:
    start_draws(3)
    model(INPUTS).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("recompute", {"every": 1}),
        ("recompute", {"schedule": "sqrt"}),
        ("recompute", {"schedule": "selective"}),
        ("optimal_recompute", {"bytes": 0.4}),
    ],
)
def test_recomputed_blocks_sample_the_same_values(name: str, settings: dict[str, Any]) -> None:
    recomputed = thrifty.apply(drawing_model(), name, **settings)
    assert equal(gradients(recomputed), gradients(drawing_model()))


def test_activation_budget_blocks_sample_the_same_values() -> None:
    model = drawing_model()
    with thrifty.activation_budget(model, "40%"):
        actual = gradients(model)
    assert equal(actual, gradients(drawing_model()))


def test_random_state_after_backward_equals_plain_run() -> None:
    following = []
    for model in (drawing_model(), thrifty.apply(drawing_model(), "recompute")):
        gradients(model)
        following.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert following[0] == following[1]
