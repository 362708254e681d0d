"""Activation budget: never slower than any single method, and feasible wherever one of them is."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from image_runs import image_run
from rank_processes import on_ranks
from recompute_work import same_on_ranks
from tiny_runs import assert_same, corpus, losses, plain_run, run_through, snapshot, technique, with_optimizer
from torch import nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.explain import explain
from thrifty.core.errors import InfeasibleError
from thrifty.core.tensor_tracing import StepTrace
from thrifty.data.text.token_windows import PackedTokens
from thrifty.memory.op_trace import INPUT
from thrifty.memory.planner.chain_plan import chain_costs, schedule_plan
from thrifty.memory.planner.chain_schedule import least_bytes, optimal_schedule, periodic_schedule, simulate
from thrifty.memory.planner.memory_plan import (
    BlockActions,
    BlockCosts,
    CompressionOption,
    OffloadLink,
    TensorAction,
    is_streamed,
    peak_when_kept,
    plan_peak,
    saved_items,
)
from thrifty.memory.planner.plan_choice import AllowedActions, best_plan, least_peak, plan_from_numbers, plan_to_numbers
from thrifty.memory.planner.plan_storage import stored_bits
from thrifty.memory.recompute_schedule import RecomputeAction, ScheduledOperation
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.memory.activation_budget import ACTIVATION_PLANNER

LINK, COMPRESSION = OffloadLink(2e9), CompressionOption(stored_bits(4), 1e-9)
EXACT = AllowedActions(link=LINK)


def nano() -> BaseRun:
    def build() -> nn.Module:
        model = assemble(ModelConfig("gpt", 6, 64, 4, 4, 256, 256, 64, True))
        initialize(model, 0, std=0.1)
        for block in model.blocks:
            block.mlp.activation = nn.Sequential(block.mlp.activation, nn.Dropout(0.1))
        return model

    return BaseRun(build, PackedTokens(corpus(), 64, 4, seed=0), NextToken())


def theirs() -> BaseRun:
    transformers = pytest.importorskip("transformers")

    def build() -> nn.Module:
        torch.manual_seed(0)
        settings = {"hidden_size": 48, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 6}
        configuration = transformers.LlamaConfig(vocab_size=256, **settings, attention_dropout=0.1, use_cache=False)
        return transformers.LlamaForCausalLM(configuration)

    return BaseRun(build, PackedTokens(corpus(), 64, 4, seed=0), NextToken())


MODELS = {"gpt": nano, "llama of transformers": theirs, "vit": partial(image_run, batch=32, depth=6, dropout=0.1)}


def run_of(plain: BaseRun, *names: str, **settings: Any) -> Run:
    return compose(plain, with_optimizer([*(technique(name) for name in names), *_budget(settings)]), 6)


def _budget(settings: dict[str, Any]) -> list[Any]:
    return [technique("memory.activation_budget", **settings)] if settings else []


@cache
def blocks_of(model: str) -> tuple[BlockCosts, ...]:
    """Return the costs of a model's blocks, in FLOPs and bytes."""
    run = run_of(MODELS[model](), bytes=1.0, offload="simulated")
    built = run.build_model().train()
    run.objective.predict(built, run.source.at(0))
    ((blocks, _),) = ACTIVATION_PLANNER.of(built).plans.values()  # type: ignore[union-attr]
    return tuple(blocks)


def by_blocks(blocks: Sequence[BlockCosts], operations: Sequence[ScheduledOperation]) -> list[ScheduledOperation]:
    """Simulate a schedule of the blocks, with a stage for the loss between forward and backward pass."""
    end, turn = len(blocks) - 1, next(i for i, (do, _) in enumerate(operations) if do is RecomputeAction.BACKWARD)
    return [
        *operations[:turn],
        ScheduledOperation(RecomputeAction.KEEP_ALL, end),
        ScheduledOperation(RecomputeAction.BACKWARD, end),
        *operations[turn:],
    ]


def streamed(blocks: Sequence[BlockCosts], way: TensorAction, last: int = 0) -> tuple[list[BlockActions], int]:
    """Return the actions that offload all saved tensors but those of the last blocks, and the bytes."""
    ways, moved = list[BlockActions](), 0
    for place, block in enumerate(blocks):
        away = {n: sizes[way] for n, sizes in block.movable.items() if way in sizes and place < len(blocks) - 1 - last}
        ways.append(dict.fromkeys(saved_items(block.tape), TensorAction.KEEP) | dict.fromkeys(away, way))
        moved += sum(away.values())
    return ways, moved


def exact_methods(blocks: Sequence[BlockCosts]) -> Iterator[tuple[str, float, float]]:
    """Yield extra seconds and peak of each single exact method, computed independently."""
    inside, count = blocks[:-1], len(blocks) - 1
    kept: list[BlockActions] = [dict.fromkeys(saved_items(block.tape), TensorAction.KEEP) for block in blocks]
    for every in range(1, count + 1):
        again = [place % every == 0 for place in range(count)]
        ways = [
            dict.fromkeys(b.tape.items, TensorAction.RECOMPUTE) if a else k
            for b, a, k in zip(inside, again, kept[:-1], strict=True)
        ]
        seconds = sum(block.whole or math.inf for block, a in zip(inside, again, strict=True) if a)
        yield f"recompute, every {every}", seconds, plan_peak(blocks, [*ways, kept[-1]])
    chain = chain_costs(blocks)
    assert chain is not None and len(chain) == len(blocks)
    alone = replace(chain, stages=chain.stages[:-1])
    plain, most = simulate(alone, periodic_schedule(count, count))
    schedules = {"recompute, sqrt": periodic_schedule(count, math.isqrt(count - 1) + 1)}
    for share in (0.1, 0.3, 0.5, 0.7):
        budget = max(int(share * most), least_bytes(alone))
        schedules[f"optimal recompute, {share:.0%}"] = optimal_schedule(alone, budget)
    for name, operations in schedules.items():
        seconds, peak = simulate(chain, by_blocks(blocks, operations))
        yield name, seconds - plain, peak
    for last in range(count):
        ways, moved = streamed(blocks, TensorAction.OFFLOAD, last)
        passes = sum(block.forward for block in blocks), sum(block.backward for block in blocks)
        seconds = sum(max(moved / LINK.bytes_per_second - each, 0.0) for each in passes)
        seconds += sum(block.streaming for block, each in zip(blocks, ways, strict=True) if is_streamed(block, each))
        yield f"offload, the last {last} blocks stay", seconds, plan_peak(blocks, ways)


def assert_best(
    blocks: Sequence[BlockCosts], singles: Sequence[tuple[str, float, float]], allowed: AllowedActions
) -> None:
    """Check that a plan fits the budget of each single method and is no slower."""
    for name, _, peak in singles:
        plan = best_plan(blocks, peak, allowed)
        assert plan is not None and plan.peak <= peak * (1 + 1e-9), name
        for other, seconds, needed in singles:
            assert needed > peak or plan.seconds <= seconds * (1 + max(plan.gap, 1e-6)), (name, other)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_no_recomputation_is_faster_or_smaller(model: str) -> None:
    blocks = blocks_of(model)
    singles = [single for single in exact_methods(blocks) if "recompute" in single[0]]
    assert_best(blocks, singles, AllowedActions())


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_no_offloading_is_faster_or_smaller(model: str) -> None:
    blocks = blocks_of(model)
    singles = list(exact_methods(blocks))
    offloads = [single for single in singles if "offload" in single[0]]
    assert_best(blocks, offloads[::3], EXACT)
    lowest = min(peak for _, _, peak in singles)
    assert least_peak(blocks, EXACT) <= lowest
    plan = best_plan(blocks, lowest, EXACT)
    assert plan is not None and plan.seconds <= min(seconds for _, seconds, peak in singles if peak <= lowest)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
def test_no_compression_is_faster_or_smaller(model: str) -> None:
    blocks = blocks_of(model)
    ways, moved = streamed(blocks, TensorAction.COMPRESS)
    seconds = COMPRESSION.seconds_per_byte * moved + sum(block.streaming for block in blocks if block.movable)
    peak = plan_peak(blocks, ways, COMPRESSION.bits)
    for recompute in (False, True):
        plan = best_plan(blocks, peak, AllowedActions(recompute, COMPRESSION))
        assert plan is not None and plan.peak <= peak * (1 + 1e-9)
        assert plan.seconds <= seconds * (1 + max(plan.gap, 1e-6))


def measured(run: Run) -> tuple[int, Any]:
    """Return the measured peak of a step without parameters and gradients, in bytes, and the planner."""
    model, batch = run.build_model().train(), run.source.at(0)
    run.backward(model, run.objective, batch)
    model.zero_grad()
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    with StepTrace(*known) as live:
        run.backward(model, run.objective, batch)
    for hook in hooks:
        hook.remove()
    return live.peak, ACTIVATION_PLANNER.get(model)


POSITIONS = 64 * 8
"""Bytes of the blocks' token inputs, which are counted although no backward pass reads them."""

SINGLES: list[tuple[str, dict[str, Any]]] = [
    ("memory.recompute", {}), ("memory.optimal_recompute", {"bytes": 0.05}),
    ("memory.offload_activations", {"to": "simulated", "prefetch": 1, "keep_last": 0}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_step_reaches_the_peak_of_each_single_method(model: str) -> None:
    plain = MODELS[model]()
    for name, settings in SINGLES:
        needed, _ = measured(compose(plain, with_optimizer([technique(name, **settings)]), 6))
        needed += POSITIONS if "of transformers" in model else 0
        found, planner = measured(run_of(plain, bytes=needed, offload="simulated"))
        ((_, plan),) = planner.plans.values()
        assert plan.peak <= needed * (1 + 1e-9) and found == pytest.approx(plan.peak, rel=0.05), name


SETTINGS: list[tuple[dict[str, Any], bool | None]] = [
    ({"bytes": 0.01}, True), ({"bytes": 0.7}, None), ({"bytes": 0.01, "offload": "simulated"}, False),
    ({"bytes": 0.2, "offload": "disk"}, False),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("settings", "is_schedule"), SETTINGS)
@pytest.mark.parametrize("names", [(), ("precision.mixed",)], ids=["fp32", "bf16"])
def test_every_kind_of_plan_is_bit_identical(
    settings: dict[str, Any], is_schedule: bool | None, names: tuple[str, ...]
) -> None:
    plain, chosen = plain_run(style="gpt", depth=5, dropout=0.3), with_optimizer([technique(name) for name in names])
    reference, expected = run_through(plain, chosen, 2)
    records, state = run_through(plain, [*chosen, technique("memory.activation_budget", **settings)], 2)
    assert losses(records) == losses(reference)
    assert_same(snapshot(state), snapshot(expected))
    assert state.model is not None
    ((_, plan),) = ACTIVATION_PLANNER.of(state.model).plans.values()  # type: ignore[union-attr]
    assert is_schedule in (plan.schedule is not None, None)


def unlike_blocks() -> nn.Module:
    """Return blocks of one class and size, of which only some have dropout."""
    model = nano().build()
    for block in model.blocks[1::2]:
        block.mlp.activation = block.mlp.activation[0]
    return model


def trained_head() -> nn.Module:
    model = nano().build().requires_grad_(False)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # untied from the embedding
    return model


@pytest.mark.parametrize("build", [unlike_blocks, trained_head])
def test_blocks_with_different_saved_tensors_train_exactly(build: Callable[[], nn.Module]) -> None:
    plain = replace(nano(), build=build)
    reference, expected = run_through(plain, with_optimizer([]), 1)
    for settings in ({"bytes": 0.5, "offload": "simulated"}, {"bytes": 0.01}):
        records, state = run_through(plain, with_optimizer([technique("memory.activation_budget", **settings)]), 1)
        assert losses(records) == losses(reference)
        assert_same(snapshot(state), snapshot(expected))


def test_refusal_names_the_allowed_actions() -> None:
    for settings, words in (({}, "recomputed"), ({"offload": "simulated"}, "recomputed or offloaded")):
        run = run_of(nano(), bytes=1000, **settings)
        with pytest.raises(InfeasibleError, match=f"6 blocks do not fit 0.00 MB; with everything {words} they take"):
            run.objective.predict(run.build_model().train(), run.source.at(0))


@pytest.mark.slow
def test_explain_names_the_chosen_kind_of_plan() -> None:
    first = explain(run_of(nano(), bytes=0.01)).decisions[0]
    assert "a schedule of whole blocks, which may recompute several together: decided tensor by tensor" in first
    first = explain(run_of(nano(), bytes=0.5)).decisions[0]
    assert "decided tensor by tensor: a schedule of whole blocks" in first and " takes " in first


def test_shared_inputs_are_not_offloaded() -> None:
    plain = nano()

    def build() -> nn.Module:
        model = plain.build()
        model.held = []  # as a user's hook on hidden states may do
        model.blocks[2].register_forward_hook(lambda block, args, output: model.held.append(output))
        return model

    run = run_of(replace(plain, build=build), bytes=1.0, offload="simulated")
    model = run.build_model().train()
    run.objective.predict(model, run.source.at(0))
    ((blocks, _),) = ACTIVATION_PLANNER.of(model).plans.values()  # type: ignore[union-attr]
    moved = [block.tape.movable_input > 0 for block in blocks[:-1]]
    assert moved == [True, True, True, False, True, True]
    assert [INPUT in block.movable for block in blocks[:-1]] == moved


def test_plans_survive_encoding_as_numbers() -> None:
    blocks = blocks_of("gpt")
    chain = chain_costs(blocks)
    assert chain is not None and len(chain) == len(blocks)
    for peak in (least_bytes(chain), 0.3 * peak_when_kept(blocks), 0.7 * peak_when_kept(blocks)):
        plan = schedule_plan(blocks, peak)
        assert plan is not None and plan.schedule is not None and plan.peak <= peak
        assert plan_from_numbers(plan_to_numbers(plan.schedule, len(blocks)), len(blocks)) == plan.schedule
    assert plan_from_numbers(plan_to_numbers(None, 5), 5) is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parallelism.shard"])
def test_ranks_follow_one_plan(strategy: str) -> None:
    settings = [("memory.activation_budget", given | {"cost_source": "measured"}) for given, _ in SETTINGS[:3:2]]
    assert on_ranks(2, same_on_ranks, strategy, settings) == [[True] * len(settings)] * 2
