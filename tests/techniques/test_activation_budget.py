"""One budget for activations: kept to, exact, explained, and no slower than any single way."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import (
    advance,
    assert_same,
    corpus,
    losses,
    plain_run,
    restored,
    run_through,
    snapshot,
    technique,
    with_optimizer,
)
from torch import nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.explain import explain
from thrifty.core.errors import InfeasibleError
from thrifty.core.technique import Numerics
from thrifty.core.tensor_tracing import StepTrace
from thrifty.data.text.token_windows import PackedTokens
from thrifty.memory.planner.memory_milp import fastest_plan
from thrifty.memory.planner.memory_plan import TensorAction, is_whole, peak_when_kept, plan_peak
from thrifty.memory.planner.plan_choice import least_peak
from thrifty.memory.recompute_overhead import measured_overheads
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.memory import activation_budget
from thrifty.techniques.memory.activation_budget import ACTIVATION_PLANNER, ActivationBudget, ActivationPlanner


def medium_run(style: str = "gpt", depth: int = 8, dropout: float = 0.1) -> BaseRun:
    """Blocks large enough that everything else hardly counts."""

    def build() -> nn.Module:
        shape = ModelConfig(style, depth, 64, 4, 4, 256, 256, 64, True)  # type: ignore[arg-type]
        model = assemble(shape)
        initialize(model, 0, std=0.1)
        for block in model.blocks:
            block.mlp.activation = nn.Sequential(block.mlp.activation, nn.Dropout(dropout))
        return model

    return BaseRun(build, PackedTokens(corpus(), 64, 4, seed=0), NextToken())


def run_of(plain: BaseRun, *names: str, **settings: Any) -> Run:
    budget = technique("memory.activation_budget", **settings)
    return compose(plain, with_optimizer([budget, *map(technique, names)]), 6)


@contextmanager
def gradients_let_go(model: nn.Module) -> Iterator[None]:
    """As they come, so that only activations add up."""
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    yield
    for hook in hooks:
        hook.remove()


def peak_of(run: Run) -> tuple[float, ActivationPlanner]:
    """Bytes at the peak of a real step beside parameters and gradients, and what had been planned."""
    model, batch = run.build_model(), run.source.at(0)
    run.backward(model, run.objective, batch)  # the plan is made
    model.zero_grad()
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    with gradients_let_go(model), StepTrace(*known) as live:
        run.backward(model, run.objective, batch)
    return live.peak, ACTIVATION_PLANNER.of(model)  # type: ignore[return-value]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("names", [(), ("precision.mixed",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("share", [0.5, 0.3, 0.8])
def test_the_measured_peak_is_the_promised_one(style: str, share: float, names: tuple[str, ...]) -> None:
    measured, planner = peak_of(run_of(medium_run(style), *names, bytes=share))
    ((blocks, plan),) = planner.plans.values()
    everything, _ = peak_of(run_of(medium_run(style), *names, bytes=1.0))
    assert peak_when_kept(blocks) == pytest.approx(everything, rel=0.05)
    assert plan.peak <= share * peak_when_kept(blocks)
    assert measured == pytest.approx(plan.peak, rel=0.05)
    assert measured < (share + 0.05) * everything


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"bits": 4, "recompute": False}, {"bits": 4}, {"offload": "disk"}])
def test_the_promise_holds_for_what_is_compressed_or_offloaded(settings: dict[str, Any]) -> None:
    measured, planner = peak_of(run_of(medium_run(), bytes=0.5, **settings))
    ((_, plan),) = planner.plans.values()
    assert measured <= plan.peak * 1.05


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"offload": "disk"}, {"offload": "simulated"}, {"cost_source": "measured"}])
@pytest.mark.parametrize("others", [(), ("large_batch.gradient_accumulation",), ("memory.none",)])
def test_without_compression_every_step_is_bitwise_the_plain_one(
    settings: dict[str, Any], others: tuple[str, ...]
) -> None:
    others = tuple(name for name in others if name != "memory.none")
    plain = plain_run(style="gpt", dropout=0.3)
    chosen = with_optimizer([technique(name) for name in others])
    reference, expected = run_through(plain, chosen, 4)
    budget = technique("memory.activation_budget", bytes=0.45, **settings)
    records, state = run_through(plain, [*chosen, budget], 4)
    assert losses(records) == losses(reference)
    assert_same(snapshot(state), snapshot(expected))


def test_under_mixed_precision_too() -> None:
    plain, chosen = plain_run(style="gpt", dropout=0.3), with_optimizer([technique("precision.mixed")])
    reference, expected = run_through(plain, chosen, 4)
    records, state = run_through(plain, [*chosen, technique("memory.activation_budget", bytes=0.5)], 4)
    assert losses(records) == losses(reference)
    assert_same(snapshot(state), snapshot(expected))


def test_what_is_made_again_is_of_few_bytes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_budget, "OVERHEADS", (0.0, 0.0))  # as good as nothing where blocks are large
    _, planner = peak_of(run_of(medium_run(), bytes=0.7))
    ((blocks, plan),) = planner.plans.values()
    kept, again = [], []
    for block, ways in zip(blocks, plan.actions, strict=True):
        for number, way in ways.items():
            item = block.tape.items[number]
            (kept if way.value == "keep" else again).append(item.seconds / item.bytes)
    assert sum(again) / len(again) < sum(kept) / len(kept)


@pytest.mark.parametrize("costs", ["counted", "measured"])
def test_no_periodic_recompute_is_faster_by_its_account_at_the_same_peak(costs: str) -> None:
    """Small blocks, whose single operations cost more to follow than to run."""
    _, planner = peak_of(run_of(plain_run(style="gpt"), cost_source=costs))
    ((blocks, _),) = planner.plans.values()
    kept: list[dict[int, TensorAction]] = [
        {n: TensorAction.KEEP for n, item in b.tape.items.items() if item.saved} for b in blocks
    ]
    for every in (1, 2, 3):
        whole = [place < len(blocks) - 1 and place % every == 0 for place in range(len(blocks))]
        ways = [
            dict.fromkeys(b.tape.items, TensorAction.RECOMPUTE) if again else keep
            for b, keep, again in zip(blocks, kept, whole, strict=True)
        ]
        seconds = sum(b.whole or math.inf for b, again in zip(blocks, whole, strict=True) if again)
        plan = fastest_plan(blocks, plan_peak(blocks, ways) * 1.0001)
        assert plan is not None and plan.seconds <= seconds * 1.006


def test_measured_costs_have_overheads_of_this_machine() -> None:
    one_by_one, as_a_whole = measured_overheads()
    assert 0 < as_a_whole < one_by_one < 5e-3
    _, planner = peak_of(run_of(plain_run(style="gpt"), cost_source="measured"))
    ((blocks, _),) = planner.plans.values()
    assert blocks[0].overhead == one_by_one * len(blocks[0].tape.operations)


def test_blocks_that_are_made_again_as_a_whole_follow_no_operations_and_change_nothing() -> None:
    plain = plain_run(style="gpt", dropout=0.3)
    reference, expected = run_through(plain, with_optimizer([]), 4)
    budget = technique("memory.activation_budget", bytes=0.05)
    records, state = run_through(plain, with_optimizer([budget]), 4)
    assert state.model is not None
    ((blocks, plan),) = ACTIVATION_PLANNER.of(state.model).plans.values()  # type: ignore[union-attr]
    chosen = [is_whole(block, ways) for block, ways in zip(blocks, plan.actions, strict=True)]
    assert sum(chosen[:-1]) > 1
    planner = ACTIVATION_PLANNER.of(state.model)  # type: ignore[union-attr]
    assert [each.is_whole for each in planner.block_plans(blocks, plan)] == chosen[:-1]  # type: ignore[operator]
    assert losses(records) == losses(reference)
    assert_same(snapshot(state), snapshot(expected))


def test_compression_is_noise_that_training_survives_and_a_resume_repeats() -> None:
    plain = plain_run(style="gpt", dropout=0.3, repeated=True)
    chosen = with_optimizer([technique("memory.activation_budget", bytes=0.4, bits=4)])
    assert chosen[0].numerics is Numerics.DIFFERENT
    run = compose(plain, chosen, 30)
    state = run.start()
    advance(run, state, 10)
    saved = snapshot(state)
    records = advance(run, state)
    resumed = restored(compose(plain, chosen, 30), saved)
    advance(compose(plain, chosen, 30), resumed)
    assert_same(snapshot(resumed), snapshot(state))
    reference, _ = run_through(plain, with_optimizer([]), 30)
    assert losses(records)[-1] == pytest.approx(losses(reference)[-1], abs=0.15)


def test_a_budget_that_is_too_small_says_what_is_needed() -> None:
    run = run_of(plain_run(), bytes=1e4)
    with pytest.raises(InfeasibleError, match=r"4 blocks do not fit 0\.01 MB; .* recomputed they take") as refused:
        run.backward(run.build_model(), run.objective, run.source.at(0))
    assert "techniques.memory.activation_budget.bytes=" in refused.value.fix


def test_without_anything_made_again_a_budget_that_is_too_small_says_so() -> None:
    run = run_of(plain_run(), bytes=0.1, bits=8, recompute=False)
    with pytest.raises(InfeasibleError) as refused:
        run.backward(run.build_model(), run.objective, run.source.at(0))
    assert "recompute=true" in refused.value.fix


def test_a_share_that_no_plan_can_keep_to_is_the_least_there_is() -> None:
    _, planner = peak_of(run_of(plain_run(), bytes=0.01))
    ((blocks, plan),) = planner.plans.values()
    assert plan.peak == least_peak(blocks)


def test_a_batch_of_another_shape_gets_a_plan_of_its_own() -> None:
    plain = plain_run(style="gpt")
    records, state = run_through(
        plain, with_optimizer([technique("memory.activation_budget"), technique("curriculum.sequence_length")]), 4
    )
    assert state.model is not None
    assert len(ACTIVATION_PLANNER.of(state.model).plans) > 1  # type: ignore[union-attr]
    assert all(math.isfinite(loss) for loss in losses(records))


@pytest.mark.slow
def test_the_plan_is_explained_tensor_by_tensor_before_the_run() -> None:
    plain = medium_run()
    explanation = explain(run_of(plain, bytes=0.5))
    first, *lines = explanation.decisions
    assert "blocks" in first and "if all were kept" in first
    assert any("recompute; costs" in line for line in lines) and any("keep; would cost" in line for line in lines)
    before = explain(compose(plain, with_optimizer([]), 6)).footprint.activations
    assert explanation.footprint.activations < 0.55 * before


@pytest.mark.slow
def test_explained_and_measured_peak_agree_with_a_hugging_face_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from thrifty.composition.explain import count

    torch.manual_seed(0)
    configuration = transformers.GPT2Config(n_layer=6, n_embd=64, n_head=4, vocab_size=256, n_positions=64)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(replace_cache(configuration))

    plain = BaseRun(build, PackedTokens(corpus(), 64, 4, seed=0), NextToken())
    run = run_of(plain, bytes=0.5)
    _, counted = count(run, run.techniques)
    model, batch = run.build_model(), run.source.at(0)
    run.backward(model, run.objective, batch)
    model.zero_grad()
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    with StepTrace(*known) as live:
        run.backward(model, run.objective, batch)
    assert live.peak == pytest.approx(max(counted.activations, counted.gradients) + counted.temporary, rel=0.05)


@pytest.mark.parametrize("offload", ["never", "simulated"])
def test_heads_that_share_keys_are_planned_by_the_time_of_their_operations(offload: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    configuration = transformers.MistralConfig(**sizes, num_key_value_heads=2, vocab_size=256, use_cache=False)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return transformers.MistralForCausalLM(configuration)

    plain = BaseRun(build, PackedTokens(corpus(), 64, 4, seed=0), NextToken())
    planned = with_optimizer([technique("memory.activation_budget", bytes=0.5, offload=offload)])
    assert explain(compose(plain, planned, 3)).footprint.activations > 0
    assert losses(run_through(plain, planned, 3)[0]) == losses(run_through(plain, with_optimizer([]), 3)[0])


def replace_cache(configuration: Any) -> Any:
    configuration.use_cache = False
    return configuration


def test_settings_survive_a_copy_with_others() -> None:
    noisy = ActivationBudget(bits=8)
    assert noisy.numerics is Numerics.DIFFERENT and replace(noisy, bits=0).numerics is Numerics.EXACT
