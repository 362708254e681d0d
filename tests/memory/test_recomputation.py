"""A block that runs again finds the random numbers of its first time, however it was called."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thrifty.memory.recomputation import recompute
from thrifty.techniques.memory.recompute import Recompute


class Named(nn.Module):
    """Two blocks that are given their input, and a mask inside a mapping, by name alone."""

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
def test_torch_is_shown_every_tensor_that_a_block_is_given_by_name(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks among what it is given by position for the devices whose random state it puts back."""
    seen: list[int] = []
    infer = torch.utils.checkpoint._infer_device_type

    def watch(*args: Any) -> str:
        seen.append(sum(isinstance(leaf, Tensor) for leaf in torch.utils._pytree.tree_leaves(args)))
        return infer(*args)

    monkeypatch.setattr(torch.utils.checkpoint, "_infer_device_type", watch)
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Named()
        model = Recompute(schedule=schedule).model(model) if again else model
        model(torch.ones(3, 8)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert seen == [2, 2]
    assert all(torch.equal(plain, found) for plain, found in zip(*gradients, strict=True))


def test_what_was_given_by_name_arrives_by_name() -> None:
    block, x = NamedBlock().eval(), torch.randn(3, 8, requires_grad=True)
    given = {"times": 2.0, "more": {"scale": torch.arange(8.0)}}
    torch.manual_seed(0)
    wanted = block(x, **given)
    torch.manual_seed(0)
    assert torch.equal(recompute(block, (x,), given), wanted)
