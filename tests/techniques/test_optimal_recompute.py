"""Optimal recompute: bit-identical runs, budgets, and cost compared with periodic schedules."""

from typing import Any

import pytest
import torch
from rank_processes import on_ranks
from recompute_work import equal, gradients, live_bytes, model_of_kind, same_on_ranks, same_run, trained
from stacked_models import KINDS
from tiny_runs import advance, assert_same, plain_run, restored, snapshot, technique, with_optimizer
from torch import Tensor, nn

from thrifty.composition.compose import compose
from thrifty.core.errors import InfeasibleError, RefusedError, UsageError
from thrifty.core.tensor_tracing import StepTrace
from thrifty.memory.block_recompute import BlockChain
from thrifty.memory.planner.chain_schedule import periodic_schedule
from thrifty.memory.recompute_schedule import RecomputeSchedule
from thrifty.modeling.module_surgery import find_stacks
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.techniques.memory.optimal_recompute import OptimalRecompute, ScheduledRecompute

SETTINGS: list[dict[str, Any]] = [
    {"bytes": 0.1}, {"bytes": 0.4}, {"bytes": 0.7}, {"bytes": 1.0}, {"bytes": 200_000},
    {"bytes": 0.4, "cost_source": "measured"},
]  # fmt: skip
BESIDE = {
    "accumulate": {"large_batch.gradient_accumulation": {"micro_batches": 2}},
    "mixed precision": {"precision.mixed": {}},
    "aot_eager": {"compile": {"backend": "aot_eager"}},
    "inductor": {"compile": {"backend": "inductor"}},
    "shorter sequences first": {"curriculum.sequence_length": {"start": 8, "until": 2, "phases": 2}},
}
TOKENS = torch.arange(512).view(8, 64) * 7 % 256


@pytest.mark.sampled(1)
@pytest.mark.parametrize("beside", [*BESIDE, "nothing"])
def test_every_budget_is_bit_identical(beside: str) -> None:
    others = [technique(name, **given) for name, given in BESIDE.get(beside, {}).items()]
    plain = trained(*others)
    for given in SETTINGS:
        assert same_run(trained(*others, OptimalRecompute(**given)), plain), given


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parallelism.shard", "parallelism.replicate"])
def test_two_ranks_are_bit_identical(strategy: str) -> None:
    settings = [("memory.optimal_recompute", given) for given in SETTINGS]
    assert on_ranks(2, same_on_ranks, strategy, settings) == [[True] * len(settings)] * 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exact_on_any_architecture(kind: str, share: float) -> None:
    planned = OptimalRecompute(bytes=share).model(model_of_kind(kind))
    assert equal(gradients(planned, kind), gradients(model_of_kind(kind), kind))


def deep(style: str) -> nn.Module:
    torch.manual_seed(0)
    return assemble(ModelConfig(style, 12, 128, 4, 4, 512, 256, 64, True)).train()  # type: ignore[arg-type]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [block for stack in find_stacks(model).values() for block in stack]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_measured_peak_is_within_and_near_the_budget(style: str) -> None:
    _, plain = live_bytes(deep(style), TOKENS)
    for share in (0.9, 0.7, 0.5, 0.35, 0.25):
        budget = int(share * plain)
        model = deep(style)
        ScheduledRecompute(model, blocks_of(model), budget)
        _, peak = live_bytes(model, TOKENS)
        assert peak <= budget
        assert peak >= budget - 0.1 * plain  # a block has a twelfth of the memory


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2", "opt", "marian"])
def test_hugging_face_peak_is_within_the_budget(name: str) -> None:
    def loss(model: nn.Module) -> int:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        with StepTrace(*model.parameters(), *model.buffers(), *held) as live:
            KINDS[name].loss(model).backward()
        return live.peak

    plain = loss(model_of_kind(name))
    for share in (0.9, 0.7, 0.6):
        model = model_of_kind(name)
        ScheduledRecompute(model, blocks_of(model), share)
        head = 2 * 32 * 48 * 4 * 3  # plus logits of 32 tokens, their gradient and the loss
        assert loss(model) <= share * plain + head


def cost_of(model: nn.Module) -> tuple[int, int]:
    """Return the FLOPs and the peak of a step."""
    _, peak = live_bytes(model, TOKENS)
    with StepTrace() as live:
        model(TOKENS).sum().backward()
    return live.flops, peak


@pytest.mark.slow
def test_no_periodic_schedule_is_cheaper_at_the_same_memory() -> None:
    activation = 8 * 64 * 128 * 4
    for every in (1, 2, 3, 4, 6):
        model = deep("gpt")
        BlockChain(blocks_of(model), RecomputeSchedule.of(periodic_schedule(12, every)))
        work, needed = cost_of(model)
        model = deep("gpt")
        ScheduledRecompute(
            model, blocks_of(model), needed + 2 * activation
        )  # the count is slightly above the measurement
        found, peak = cost_of(model)
        assert peak <= needed + 2 * activation
        assert found <= work
        assert found < work or every == 1


class Alternating(nn.Module):
    """Blocks of two alternating kinds: many saved bytes and fast, or few saved bytes and slow."""

    class Block(nn.Module):
        def __init__(self, products: int, tanhs: int):
            super().__init__()
            self.linears = nn.Sequential(*(nn.Linear(512, 512) for _ in range(products)))
            self.tanhs = tanhs

        def forward(self, x: Tensor) -> Tensor:
            y = self.linears(x)
            for _ in range(self.tanhs):
                y = torch.tanh(y)
            return x + y

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(*kind) for _ in range(5) for kind in ((0, 6), (4, 0)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
def test_unequal_blocks_have_different_decisions() -> None:
    x = torch.randn(4096, 512)
    _, plain = live_bytes(Alternating(), x)
    model = Alternating()
    planned = ScheduledRecompute(model, list(model.blocks), int(0.7 * plain))
    _, peak = live_bytes(model, x)
    assert peak <= 0.7 * plain
    (schedule,) = planned.schedules.values()
    assert schedule.again and all(block % 2 == 0 for block in schedule.again)


def test_budget_below_the_minimum_names_the_minimum() -> None:
    run = compose(plain_run(depth=6), with_optimizer([OptimalRecompute(bytes=1000)]), 2)
    with pytest.raises(InfeasibleError, match="6 stages cannot be trained with 1,000 bytes") as infeasible:
        advance(run, run.start(), 1)
    least = int(infeasible.value.fix.split()[-2].replace(",", ""))
    run = compose(plain_run(depth=6), with_optimizer([OptimalRecompute(bytes=least)]), 2)
    advance(run, run.start(), 1)


@pytest.mark.parametrize("given", [0, -5, 0.0])
def test_invalid_budget_is_refused(given: float) -> None:
    with pytest.raises(UsageError, match="bytes must be above 0"):
        OptimalRecompute(bytes=given)


def test_value_dependent_shapes_are_refused() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: Tensor) -> Tensor:
            rows = (x.sum(-1) > 0).nonzero()[:, 0]
            return x.index_add(0, rows, self.layers[1](self.layers[0](x[rows])))

    model = nn.Sequential()
    model.blocks = nn.ModuleList([Routed(), Routed()])
    model.forward = lambda x: model.blocks[1](model.blocks[0](x))
    ScheduledRecompute(model, list(model.blocks), 0.5)
    with pytest.raises(RefusedError, match="the cost of Routed depends on values, not only on shapes") as refused:
        model(torch.randn(4, 8, requires_grad=True))
    assert "memory.recompute" in refused.value.fix


@pytest.mark.slow
def test_each_batch_shape_has_its_own_schedule() -> None:
    model = deep("gpt")
    planned = ScheduledRecompute(model, blocks_of(model), 20_000_000)
    for rows in (8, 2, 8):
        model(TOKENS[:rows]).sum().backward()
    assert len(planned.schedules) == 2
    large, small = planned.schedules.values()
    assert large.again and not small.again  # two rows fit without recomputation
    with torch.no_grad():
        model(TOKENS[:4])
    assert len(planned.schedules) == 2


def test_unfrozen_parameters_have_their_own_schedule() -> None:
    model = plain_run().build()
    planned = ScheduledRecompute(model, blocks_of(model), 0.5)
    for is_trained in (False, True, False):
        model.blocks.requires_grad_(is_trained)
        model(TOKENS[:, :16]).sum().backward()
    assert len(planned.schedules) == 2


def test_resume_with_another_budget_is_exact() -> None:
    """A resumed run may measure other costs, and must compute equal values."""
    plain = plain_run(depth=6, dropout=0.3)
    run = compose(plain, with_optimizer([OptimalRecompute(bytes=0.2)]), 4)
    state = run.start()
    advance(run, state, 2)
    saved = snapshot(state)
    advance(run, state)
    other = compose(plain, with_optimizer([OptimalRecompute(bytes=0.7, cost_source="measured")]), 4)
    resumed = restored(other, saved)
    advance(other, resumed)
    assert_same(snapshot(resumed), snapshot(state))
