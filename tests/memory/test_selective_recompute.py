"""Blocks that follow a plan compute the same values as without one, for any plan."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError
from thrifty.core.tensor_tracing import StepTrace
from thrifty.memory.dry_run import dry_run
from thrifty.memory.op_trace import OpTrace
from thrifty.memory.selective_recompute import BlockPlan, keep_tensor, run_block_plan
from thrifty.modeling.module_surgery import wrap_forward

WIDTH = 16


class Block(nn.Module):
    """A block with two dropouts, a fused projection, an in-place operation, and a tensor read before it is written
    again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(mixed))
        inside = self.up(x)
        gate = torch.zeros_like(inside)
        before = gate + inside
        gate.add_(inside.detach()).sigmoid_()
        inside = F.gelu(inside * gate + before).relu_()
        return x + self.dropout(self.down(inside))


class Stack(nn.Module):
    def __init__(self, depth: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.run: Callable[..., Any] = lambda place, inner, *args: inner(*args)
        for place, block in enumerate(self.blocks):
            wrap_forward(block, lambda module, inner, *args, place=place: self.run(place, inner, *args))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step(stack: Stack, autocast: bool) -> tuple[list[Tensor], int]:
    """Return the gradients, and the bytes alive after the forward pass."""
    x = torch.linspace(-1, 1, 2 * 8 * WIDTH).view(2, 8, WIDTH)
    stack.zero_grad()
    torch.manual_seed(1)
    with StepTrace(*stack.parameters(), x) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = stack(x)
        loss, alive = result.float().square().sum(), live.now
        loss.backward()
    return [result.detach(), *(parameter.grad.clone() for parameter in stack.parameters())], alive


def tapes_of(stack: Stack, autocast: bool) -> list[OpTrace]:
    x = torch.zeros(2, 8, WIDTH)
    with dry_run(stack, lambda *_: 0.0) as rehearsal, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stack.run = lambda place, inner, *args: rehearsal.run(str(place), stack.blocks[place], inner, args, {})
        stack(x)
    return rehearsal.tapes


def plan_of(tape: OpTrace, stored: set[int]) -> BlockPlan:
    """Return a plan that stores `stored` and recomputes everything else that is required."""
    again: set[int] = set()
    needed = [item.number for item in tape.items.values() if item.saved]
    while needed:
        number = needed.pop()
        if number not in stored | again:
            again.add(number)
            needed += tape.items[number].reads
    return BlockPlan(tape, dict.fromkeys(stored, keep_tensor), frozenset(again))


def follow(stack: Stack, plans: list[BlockPlan]) -> None:
    stack.run = lambda place, inner, *args: run_block_plan(plans[place], inner, args, {})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("autocast", [False, True])
def test_any_stored_items_give_bit_identical_step(autocast: bool) -> None:
    stack = Stack()
    expected, all_kept = step(stack, autocast)
    tapes = tapes_of(stack, autocast)
    rng = random.Random(0)
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        for _ in range(3):
            plans = []
            for tape in tapes:
                storable = [item.number for item in tape.items.values() if item.storable]
                plans.append(plan_of(tape, {number for number in storable if rng.random() < share}))
            follow(stack, plans)
            found, alive = step(stack, autocast)
            assert all(torch.equal(mine, plain) for mine, plain in zip(found, expected, strict=True))
            assert share or alive < all_kept / 3


def test_tensor_read_before_a_later_write_is_not_storable() -> None:
    tape = tapes_of(Stack(1), False)[0]
    gates = [item for item in tape.items.values() if item.name == "zeros_like"]
    assert [item.storable for item in gates] == [False]
    assert all(item.storable for item in tape.items.values() if item not in gates)


def test_saved_bytes_of_trace_equal_autograd() -> None:
    stack = Stack(1)
    _, alive = step(stack, False)
    (tape,) = tapes_of(stack, False)
    result = 2 * 8 * WIDTH * 4  # alive too, like the loss
    assert 0 <= alive - tape.saved_bytes - result <= 8


def test_dry_run_leaves_no_traces() -> None:
    stack = Stack()
    stack.register_buffer("calls", torch.zeros(1))
    stack.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    tapes_of(stack, False)
    assert torch.equal(torch.get_rng_state(), before) and stack.calls.item() == 0
    assert all(parameter.grad is None for parameter in stack.parameters())


def test_writes_outside_the_block_run_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(8)
            self.register_buffer("largest", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            inside = self.inside(x).sigmoid()
            self.largest.add_(inside.detach().amax())
            return self.norm(inside) + x

    def after(planned: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        block = Counting()
        x = torch.randn(2, 8, WIDTH, requires_grad=True)
        if planned:
            with dry_run(block, lambda *_: 0.0) as rehearsal:
                rehearsal.run("block", block, block.forward, (x,), {})
            (tape,) = rehearsal.tapes
            kept = {number for number, item in tape.items.items() if not item.repeatable}
            assert len(kept) == 1
            run_block_plan(plan_of(tape, kept), block.forward, (x,), {}).square().sum().backward()
        else:
            block(x).square().sum().backward()
        assert x.grad is not None
        return {**block.state_dict(), "gradient": x.grad}

    plain, found = after(False), after(True)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


def test_items_name_their_module() -> None:
    tape = tapes_of(Stack(1), False)[0]
    assert {"norm", "qkv", "out", "up", "down", "dropout", ""} == {item.where for item in tape.items.values()}


def test_block_that_changes_is_an_error() -> None:
    stack = Stack(1)
    tapes = tapes_of(stack, False)
    follow(stack, [plan_of(tapes[0], set())])
    stack.blocks[0].dropout.p = 0.0
    with pytest.raises(IntegrityError, match=r"operation \d+ of a block is .*, but its plan has .* there"):
        step(stack, False)


def test_second_backward_pass_through_a_plan_is_an_error() -> None:
    stack = Stack(1)
    (tape,) = tapes_of(stack, False)
    projection = next(item.number for item in tape.items.values() if item.where == "qkv" and item.saved)
    follow(stack, [plan_of(tape, {projection})])
    loss = stack(torch.randn(2, 8, WIDTH)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(IntegrityError, match="a second time"):
        loss.backward()
