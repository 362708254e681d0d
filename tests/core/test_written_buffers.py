"""Blocks with buffers that the forward pass writes, such as BatchNorm: a recomputed pass writes them only once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pair_runs import pair_run
from tiny_runs import technique
from torch import Tensor, nn

from thrifty.core.backward import plain_backward
from thrifty.core.batches import Batch
from thrifty.core.objective import Objective
from thrifty.core.written_buffers import SMALL
from thrifty.memory.recomputation import recompute
from thrifty.techniques.large_batch.gradient_cache import cached

WIDTH, BLOCKS, STEPS = 6, 5, 3


class Writing(nn.Module):
    """Block with a batch norm, a spectral norm, a buffer written in place and a replaced buffer.

    The output depends on all buffers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inside = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("largest", torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("codes", torch.zeros(SMALL + 1))
        self.register_buffer("table", torch.ones(SMALL + 1))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.inside(self.norm(x)).sigmoid() * self.table[0]
        result = x + inside / self.largest.clone() + 0.1 * self.calls + self.codes[:1].clone()
        with torch.no_grad():
            self.largest.mul_(0.9).add_(inside.amax())
            self.codes.add_(inside.mean())
        self.calls = self.calls + 1
        return result


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Writing() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def after_steps(change: Callable[[nn.Module], nn.Module] = lambda model: model) -> dict[str, Tensor]:
    """Return the gradients of each step, and the buffers after all steps, with two micro-batches per step."""
    torch.manual_seed(0)
    model = change(Stack())
    results = {}
    for step in range(STEPS):
        outputs = [model(torch.randn(4, WIDTH, requires_grad=True)) for _ in range(2)]
        for output in outputs:
            output.square().sum().backward()
        results |= {
            f"{step} {name}": each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
        }
    return results | dict(model.named_buffers())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("memory.recompute", {}), ("memory.recompute", {"every": 2}), ("memory.recompute", {"schedule": "sqrt"}),
        ("memory.recompute", {"schedule": "selective"}), ("memory.optimal_recompute", {"bytes": 0.3}),
        ("memory.optimal_recompute", {"bytes": 0.7}),
    ],
)  # fmt: skip
def test_recomputed_block_writes_buffers_once(name: str, settings: dict[str, Any]) -> None:
    plain, results = after_steps(), after_steps(lambda model: technique(name, **settings).model(model))
    assert len(plain) > STEPS * BLOCKS and results.keys() == plain.keys()
    assert not [name for name, value in plain.items() if not torch.equal(results[name], value)]


def test_buffers_are_restored_for_each_call_of_a_module() -> None:
    def twice(block: nn.Module, again: bool) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, WIDTH, requires_grad=True)
        for _ in range(2):
            x = recompute(block, (x,), {}, block) if again else block(x)
        x.square().sum().backward()
        return torch.cat([each.grad.flatten() for each in block.parameters() if each.grad is not None])

    torch.manual_seed(1)
    one, other = Writing(), Writing()
    other.load_state_dict(one.state_dict())
    assert torch.equal(twice(one, False), twice(other, True))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gradient_cache_writes_buffers_once(parts: int) -> None:
    def after(backward: Callable[..., Any]) -> dict[str, Tensor]:
        plain = pair_run(batch=10)
        model, batch = plain.build(), plain.source.at(0)
        blocks = model.image.blocks
        blocks[0].attention_norm = nn.Sequential(blocks[0].attention_norm, Counting())
        backward(model, plain.objective, batch)
        return dict(model.named_buffers())

    def in_parts(model: nn.Module, objective: Objective, batch: Batch) -> None:
        rows = len(batch) // parts
        for start in range(0, len(batch), rows):
            objective.predict(model, batch.rows(start, start + rows))

    wanted, results = after(in_parts), after(cached(plain_backward, parts))
    assert wanted and all(torch.equal(value, results[name]) for name, value in wanted.items())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean())
        return x
