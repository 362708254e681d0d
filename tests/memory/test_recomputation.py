"""A recomputed block restores its random state, with positional and keyword arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thrifty.memory.recomputation import recompute
from thrifty.techniques.memory.recompute import Recompute


class Named(nn.Module):
    """A model of two blocks that receive their input, and a mask inside a mapping, only by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NamedBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(hidden=x, more={"scale": torch.ones(8)})
        return x


class NamedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor, more: dict[str, Tensor], times: float = 1.0) -> Tensor:
        inner = nn.functional.dropout(self.first(hidden).relu(), 0.5)
        return hidden + self.second(inner) * more["scale"] * times


@pytest.mark.parametrize("schedule", ["every", "selective"])
def test_keyword_tensors_reach_torch_checkpoint_by_position(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch restores the random state only of devices of positional arguments."""
    seen: list[int] = []
    infer = torch.utils.checkpoint._infer_device_type

    def watch(*args: Any) -> str:
        seen.append(sum(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(args)))
        return infer(*args)

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", watch)
    gradients = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = Named()
        model = Recompute(schedule=schedule).model(model) if recomputed else model
        model(torch.ones(3, 8)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert seen == [2, 2]
    assert all(torch.equal(plain, actual) for plain, actual in zip(*gradients, strict=True))


def test_keyword_arguments_arrive_by_keyword() -> None:
    block, x = NamedBlock().eval(), torch.randn(3, 8, requires_grad=True)
    options = {"times": 2.0, "more": {"scale": torch.arange(8.0)}}
    torch.manual_seed(0)
    expected = block(x, **options)
    torch.manual_seed(0)
    assert torch.equal(recompute(block, (x,), options), expected)
