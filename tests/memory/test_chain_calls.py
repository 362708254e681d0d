"""Recomputed calls of blocks: gradients are independent of the schedule, and no memory is held by mistake."""

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

from thrifty.core.errors import IntegrityError, RefusedError
from thrifty.core.tensor_tracing import StepTrace, gc_disabled
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.recompute_schedule import RecomputeAction, RecomputeSchedule, ScheduledOperation

PASS, INPUT, ALL, BACK = RecomputeAction
WIDTH, ROWS = 16, 8
A = 4 * WIDTH * ROWS
"""Bytes of an activation."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.dropout(torch.tanh(self.linear(x)))


class Loop(nn.Module):
    """A model that calls its blocks in any order; `between` may change hidden states after each block."""

    def __init__(
        self, depth: int, order: Sequence[int] | None = None, between: Callable[[Tensor], Tensor] = lambda x: x
    ):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.order, self.between = order or range(depth), between

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.between(self.blocks[index](x))
        return x


def inputs() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).requires_grad_()


def gradients(model: nn.Module, *times: int) -> list[Tensor]:
    x = inputs()
    torch.manual_seed(1)
    model(x).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


advice = some.dictionaries(some.integers(0, 5), some.sampled_from([PASS, INPUT, ALL]))


@settings(max_examples=60)
@given(first=advice, again=some.dictionaries(some.integers(0, 5), advice))
def test_gradients_are_independent_of_the_schedule(
    first: dict[int, RecomputeAction], again: dict[int, dict[int, RecomputeAction]]
) -> None:
    expected = gradients(Loop(6))
    model = Loop(6)
    BlockChain(list(model.blocks), RecomputeSchedule(first, again))
    assert_equal(gradients(model), expected)


ODD_LOOPS = {
    "a block left out": lambda: Loop(5, [0, 1, 3, 4]),
    "out of order": lambda: Loop(4, [2, 0, 3, 1]),
    "one block twice in a row": lambda: Loop(3, [0, 1, 1, 2]),
    "all blocks again": lambda: Loop(3, [0, 1, 2, 0, 1, 2]),
    "something between blocks": lambda: Loop(4, between=lambda x: 1.1 * x),
    "an in-place change between blocks": lambda: Loop(4, between=lambda x: x.mul_(1.1)),
    "a view between blocks": lambda: Loop(4, between=lambda x: x.view(2, -1, WIDTH)),
}


@pytest.mark.parametrize("name", ODD_LOOPS)
@pytest.mark.parametrize("do", [PASS, INPUT])
def test_model_may_call_blocks_in_any_order(name: str, do: RecomputeAction) -> None:
    expected = gradients(ODD_LOOPS[name]())
    model = ODD_LOOPS[name]()
    BlockChain(list(model.blocks), RecomputeSchedule(dict.fromkeys(range(5), do)))
    assert_equal(gradients(model), expected)


def test_one_shared_block_is_a_chain() -> None:
    results, models = [], (Loop(1, [0] * 6), Loop(1, [0] * 6))
    for model in models:
        if model is models[1]:
            BlockChain([model.blocks[0]] * 6, RecomputeSchedule({place: PASS for place in range(1, 6)} | {0: INPUT}))
        results.append(gradients(model))
    assert_equal(*results)
    assert models[1].blocks[0].runs == 6 + (6 + 5 + 4 + 3 + 2 + 1)


def test_several_forward_passes_before_backward() -> None:
    results = []
    for recomputed in (False, True):
        model = Loop(4)
        if recomputed:
            BlockChain(list(model.blocks), RecomputeSchedule(dict.fromkeys(range(4), PASS)))
        torch.manual_seed(0)
        first, second = model(inputs()), model(inputs() + 1)
        (first * second).sum().backward(retain_graph=True)
        first.sum().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    assert_equal(*results)


def test_schedule_runs_and_keeps_exactly_its_operations() -> None:
    """Run a schedule in which two of four blocks keep nothing; recomputation for the last block keeps the third's
    input."""
    operations = [(INPUT, 0), (PASS, 1), (PASS, 2), (ALL, 3), (BACK, 3), (INPUT, 0), (PASS, 1), (ALL, 2), (BACK, 2)]
    operations += [(ALL, 0), (ALL, 1), (BACK, 1), (BACK, 0)]
    model = Loop(4).eval()
    BlockChain(list(model.blocks), RecomputeSchedule.of([ScheduledOperation(*each) for each in operations]))
    with StepTrace():
        torch.ones(1)  # the first operation imports torch's compiler, whose leftovers hold local variables
    x = inputs()
    with gc_disabled(), StepTrace(x, *model.parameters()) as live:
        out = model(x)
        assert live.now == 3 * A  # the last block keeps its input and the result of its tanh; and the output
        out.sum().backward()
    assert [block.runs for block in model.blocks] == [3, 3, 2, 1]


def test_kept_tensors_are_freed_with_the_graph() -> None:
    model = Loop(4)
    chain = BlockChain(list(model.blocks), RecomputeSchedule(dict.fromkeys(range(4), PASS)))
    with gc_disabled():
        out = model(inputs())
        call = chain._latest
        assert call is not None and call() is not None
        del out
        assert call() is None  # freed at once, without the cycle collector


def test_kept_inputs_pass_saved_tensor_hooks() -> None:
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor.double()

    expected = gradients(Loop(4))
    model = Loop(4)
    BlockChain(list(model.blocks), RecomputeSchedule({1: PASS, 3: PASS}))
    x = inputs()
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
        out = model(x)
    assert seen == [ROWS * WIDTH] * 2
    out.square().sum().backward()
    assert_equal([x.grad, *(parameter.grad for parameter in model.parameters())], expected)


def test_hooks_of_a_block_run_each_time() -> None:
    results = []
    for recomputed in (False, True):
        model = Loop(3)
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, output: 0.5 * output)
            block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        if recomputed:
            BlockChain(list(model.blocks), RecomputeSchedule({1: PASS, 2: PASS}))
        results.append(gradients(model))
    assert_equal(*results)


def test_nothing_is_recorded_without_gradients() -> None:
    model = Loop(3)
    chain = BlockChain(list(model.blocks), RecomputeSchedule())
    with torch.no_grad():
        model(inputs())
    assert chain._latest is None
    assert type(model.blocks[0]).__name__ == "Block" and isinstance(model.blocks[0], Block)
    assert list(model.state_dict()) == list(Loop(3).state_dict())


def test_recomputation_restores_autocast() -> None:
    results = []
    for recomputed in (False, True):
        model, x = Loop(3), inputs()
        if recomputed:
            BlockChain(list(model.blocks), RecomputeSchedule({1: PASS, 2: PASS}))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert_equal(*results)


class Wavering(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + torch.tanh(self.linear(x[: ROWS - self.runs])).sum()


def test_block_that_changes_between_runs_is_detected() -> None:
    model = Loop(1)
    model.blocks[0] = Wavering()
    BlockChain(list(model.blocks), RecomputeSchedule())
    with pytest.raises(IntegrityError, match="block 0 saved"):
        gradients(model)


class Cache:
    def update(self) -> None: ...


def test_writable_cache_is_refused() -> None:
    model = Loop(1)
    BlockChain(list(model.blocks), RecomputeSchedule())
    with pytest.raises(RefusedError, match="Block cannot be recomputed: it writes into its argument of type 'Cache'"):
        model.blocks[0](inputs(), Cache())


def test_outputs_are_weakly_referenced() -> None:
    model = Loop(2)
    chain = BlockChain(list(model.blocks), RecomputeSchedule())
    out = model(inputs())
    call = chain._latest() if chain._latest else None
    assert call is not None
    ((reference, _),) = call.outputs
    assert isinstance(reference, weakref.ref) and reference() is out
