"""Costs of blocks, counted without running them, compared with hand-computed costs and with real steps."""

from collections.abc import Callable, Hashable

import pytest
import torch
from recompute_work import model_of_kind
from tiny_runs import composed, plain_run, technique, with_optimizer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from thrifty.memory import block_costs
from thrifty.memory.block_chain_costs import ChainSurvey, survey
from thrifty.memory.block_costs import WORTH_OF_A_BYTE
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.recompute_schedule import ChainCost, ChainStageCost, RecomputeSchedule
from thrifty.modeling.module_surgery import find_stacks

WIDTH, ROWS = 16, 8
A = 4 * WIDTH * ROWS
"""Bytes of an activation."""


class Block(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width, bias=False), nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, *widths: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(map(Block, widths))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = nn.functional.dropout(self.norm(x))
        mask = torch.ones(ROWS, 1)
        for block in self.blocks:
            x = block(x, mask)
        return x


def costs(model: nn.Module, *args: Tensor, timed: bool = False) -> ChainCost:
    blocks = [block for stack in find_stacks(model).values() for block in stack]
    return survey(model, BlockChain(blocks, RecomputeSchedule()), model, args, {}, timed)


def test_block_cost_equals_hand_computed_cost() -> None:
    product = 2 * ROWS * WIDTH * 2 * WIDTH  # to the hidden width of twice the width, and the same back
    cost = costs(Model(2 * WIDTH, WIDTH), torch.randn(ROWS, WIDTH))
    assert cost.input == A + 4 * ROWS  # and the mask
    first, second = cost.stages
    # forward: two products, and results of 2A, 2A, A, A and A bytes
    assert first.forward == 2 * product + WORTH_OF_A_BYTE * 7 * A
    assert first.stopped == 2 * product + WORTH_OF_A_BYTE * 5 * A  # the mask is saved last
    assert first.backward >= 4 * product
    assert first.output == A
    assert first.saved == 2 * A + A  # the tanh, and the output
    # during the sum: the product with the mask; during the tanh: its input
    assert first.keeping == A and first.passing == 4 * A - A
    assert second.saved == 2 * A
    assert cost.kept == cost.input + 5 * A


def test_cost_survey_changes_nothing() -> None:
    model, x = Model(8, 8), torch.randn(ROWS, WIDTH)
    model.norm.weight.grad = torch.ones(WIDTH)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator, inner = torch.get_rng_state(), dict(model.__dict__)
    for timed in (False, True):
        costs(model, x, timed=timed)
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.calls == 0 and inner.keys() == model.__dict__.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.norm.weight.grad, torch.ones(WIDTH))
    assert all(parameter.grad is None for parameter in model.blocks.parameters())


def test_cost_survey_is_invisible_to_saved_tensor_hooks() -> None:
    seen: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda saved: saved):
        costs(Model(8, 8), torch.randn(ROWS, WIDTH))
    assert not seen


def test_fake_models_cost_the_same_as_real_models() -> None:
    real = costs(Model(8, 12), torch.randn(ROWS, WIDTH))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert costs(Model(8, 12), torch.randn(ROWS, WIDTH)) == real


def test_measured_times_keep_ratios_of_counted_ones() -> None:
    x = torch.randn(ROWS, WIDTH)
    counted, timed = costs(Model(8, 4096), x), costs(Model(8, 4096), x, timed=True)
    assert [stage.saved for stage in counted.stages] == [stage.saved for stage in timed.stages]
    small, large = timed.stages
    assert 0 < small.forward < large.forward < 1
    for mine, theirs in zip(timed.stages, counted.stages, strict=True):
        assert mine.backward / mine.forward == pytest.approx(theirs.backward / theirs.forward)


def test_encoder_decoder_is_one_chain() -> None:
    cost = costs(model_of_kind("our t5"), torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long))
    encoder, decoder = cost.stages[:3], cost.stages[3:]
    assert len(decoder) == 2 and len(set(encoder)) == len(set(decoder)) == 1
    assert decoder[0].saved > encoder[0].saved and decoder[0].forward > encoder[0].forward


def test_frozen_blocks_save_less() -> None:
    model, x = Model(8, 8), torch.randn(ROWS, WIDTH)
    model.blocks[1].requires_grad_(False)
    trained, frozen = costs(model, x).stages
    assert (
        isinstance(frozen, ChainStageCost) and frozen.backward < trained.backward and frozen.forward == trained.forward
    )


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows by one for each call that is counted forward and backward."""
    counted, count = list[object](), block_costs._counted
    monkeypatch.setattr(block_costs, "_counted", lambda *args: counted.append(args[0]) or count(*args))
    return counted


def test_equal_blocks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = counted_calls(monkeypatch)
    stages = costs(Model(8, 12, 8, 8), torch.randn(ROWS, WIDTH)).stages
    assert len(counted) == 2
    assert stages[0] == stages[2] == stages[3] != stages[1]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Tripling(Doubling):
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient + gradient + gradient


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Doubling.apply, Tripling.apply),  # the same operations forward
        (torch.sin, torch.cos),
        (lambda x: x * x.clone(), lambda x: x * x),  # other tensors saved
        (lambda x: x + x.detach(), lambda x: x.detach() + x.detach()),  # another autograd graph
        (lambda x: x.exp().sin(), lambda x: x.sin().exp()),
        (lambda x: x + 1, lambda x: x + 2.5),
    ],
)
def test_different_calls_have_different_costs(
    one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doing(nn.Module):
        def __init__(self, what: Callable[[Tensor], Tensor]):
            super().__init__()
            self.what = what

        def forward(self, x: Tensor) -> Tensor:
            return x + self.what(x)

    counted, known = counted_calls(monkeypatch), dict[Hashable, ChainStageCost]()
    x = torch.randn(4, 4, requires_grad=True)
    for times, what in ((1, one), (1, one), (2, other), (2, other)):
        block = Doing(what)
        cost, _ = block_costs.block_cost(block, block.forward, (x,), {}, known)
        assert len(counted) == times
        alone, _ = block_costs.block_cost(block, block.forward, (x,), {})
        assert counted.pop() and cost == alone


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name",
    [
        "adapters.lora",
        "attention.block_sparse",
        "attention.dota",
        "attention.spatten",
        "compile",
        "growth.layer_drop",
        "initializations.rezero",
        "memory.recompute",
        "precision.float8",
        "sparsity.n_of_m",
    ],
)
def test_shared_costs_equal_costs_of_each_block_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def survey_costs() -> ChainCost:
        model = composed(plain_run(), with_optimizer([technique(name)]), 4).build_model()
        return costs(model, torch.zeros(2, 16, dtype=torch.long))

    shared = survey_costs()
    monkeypatch.setattr(ChainSurvey, "known", property(lambda self: {}, lambda self, value: None), raising=False)
    assert survey_costs() == shared
