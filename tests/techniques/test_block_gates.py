"""Gates of blocks: a closed gate passes the input on, in the form of the block's output."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thrifty.core.errors import RefusedError
from thrifty.techniques.growth._block_gates import add_gates, gates


class Block(nn.Module):
    """Block with one of four forms of output."""

    def __init__(self, form: str):
        super().__init__()
        self.form, self.first, self.second, self.calls = form, nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None) -> Any:
        self.calls += 1
        y = x + self.second(self.first(x).relu())
        outputs = {"alone": y, "weights": (y, None), "passed": (y, bias, mask), "made": (y, y.mean())}
        return outputs[self.form]


class Stack(nn.Module):
    def __init__(self, form: str):
        super().__init__()
        self.blocks = nn.ModuleList(Block(form) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor) -> list[Any]:
        outputs = []
        for block in self.blocks:
            outputs.append(block(x, mask, bias=bias))
            x = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
        return outputs


@pytest.mark.parametrize("was_open", [True, False])
@pytest.mark.parametrize("form", ["alone", "weights", "passed"])
def test_a_closed_gate_returns_its_input_in_the_form_of_blocks(form: str, was_open: bool) -> None:
    model, (x, mask, bias) = Stack(form), torch.randn(3, 2, 8)
    add_gates(model, "growth.layer_drop")
    if was_open:
        model(x, mask, bias)
    calls, draws = model.blocks[1].calls, torch.get_rng_state()
    with gates(model, "growth.layer_drop", lambda stack, index, blocks: index != 1):
        first, second, _ = model(x, mask, bias)
    before, after = (first, second) if form == "alone" else (first[0], second[0])
    assert torch.equal(before, after)
    assert model.blocks[1].calls == calls + (not was_open)  # the form of a block that was never called is tried
    assert torch.equal(torch.get_rng_state(), draws)
    if form != "alone":
        assert second[1:] == ((None,) if form == "weights" else (bias, mask))


@pytest.mark.parametrize("is_open", [True, False])
def test_a_block_that_makes_more_than_hidden_states_is_refused(is_open: bool) -> None:
    model = Stack("made")
    add_gates(model, "growth.layer_drop")
    with (
        gates(model, "growth.layer_drop", lambda stack, index, blocks: is_open),
        pytest.raises(RefusedError, match="Block returns more than hidden states"),
    ):
        model(*torch.randn(3, 2, 8))
