"""Activation budget: limit, exactness, explanation and speed."""

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
from torch import Tensor, nn

import thrifty
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
    """Return blocks that dominate the memory of a step."""

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
    """Free gradients as they arrive, so that only activations accumulate."""
    hooks = [p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)) for p in model.parameters()]
    yield
    for hook in hooks:
        hook.remove()


def peak_of(run: Run) -> tuple[float, ActivationPlanner]:
    """Return the measured peak of a step without parameters and gradients, in bytes, and the planned peak."""
    model, batch = run.build_model(), run.source.at(0)
    run.backward(model, run.objective, batch)  # computes the plan
    model.zero_grad()
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    with gradients_let_go(model), StepTrace(*known) as live:
        run.backward(model, run.objective, batch)
    return live.peak, ACTIVATION_PLANNER.of(model)  # type: ignore[return-value]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("names", [(), ("precision.mixed",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("share", [0.5, 0.3, 0.8])
def test_measured_peak_equals_predicted_peak(style: str, share: float, names: tuple[str, ...]) -> None:
    measured, planner = peak_of(run_of(medium_run(style), *names, bytes=share))
    ((blocks, plan),) = planner.plans.values()
    everything, _ = peak_of(run_of(medium_run(style), *names, bytes=1.0))
    assert peak_when_kept(blocks) == pytest.approx(everything, rel=0.05)
    assert plan.peak <= share * peak_when_kept(blocks)
    assert measured == pytest.approx(plan.peak, rel=0.05)
    assert measured < (share + 0.05) * everything


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"bits": 4, "recompute": False}, {"bits": 4}, {"offload": "disk"}])
def test_prediction_holds_for_compressed_and_offloaded_tensors(settings: dict[str, Any]) -> None:
    measured, planner = peak_of(run_of(medium_run(), bytes=0.5, **settings))
    ((_, plan),) = planner.plans.values()
    assert measured <= plan.peak * 1.05


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", [{}, {"offload": "disk"}, {"offload": "simulated"}, {"cost_source": "measured"}])
@pytest.mark.parametrize("others", [(), ("large_batch.gradient_accumulation",), ("memory.none",)])
def test_bit_identical_without_compression(settings: dict[str, Any], others: tuple[str, ...]) -> None:
    others = tuple(name for name in others if name != "memory.none")
    plain = plain_run(style="gpt", dropout=0.3)
    chosen = with_optimizer([technique(name) for name in others])
    reference, expected = run_through(plain, chosen, 4)
    budget = technique("memory.activation_budget", bytes=0.45, **settings)
    records, state = run_through(plain, [*chosen, budget], 4)
    assert losses(records) == losses(reference)
    assert_same(snapshot(state), snapshot(expected))


def test_bit_identical_under_mixed_precision() -> None:
    plain, chosen = plain_run(style="gpt", dropout=0.3), with_optimizer([technique("precision.mixed")])
    reference, expected = run_through(plain, chosen, 4)
    records, state = run_through(plain, [*chosen, technique("memory.activation_budget", bytes=0.5)], 4)
    assert losses(records) == losses(reference)
    assert_same(snapshot(state), snapshot(expected))


def test_cheap_operations_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_budget, "OVERHEADS", (0.0, 0.0))  # negligible for large blocks
    _, planner = peak_of(run_of(medium_run(), bytes=0.7))
    ((blocks, plan),) = planner.plans.values()
    kept, again = [], []
    for block, ways in zip(blocks, plan.actions, strict=True):
        for number, way in ways.items():
            item = block.tape.items[number]
            (kept if way.value == "keep" else again).append(item.seconds / item.bytes)
    assert sum(again) / len(again) < sum(kept) / len(kept)


@pytest.mark.parametrize("costs", ["counted", "measured"])
def test_no_periodic_recompute_is_faster_at_the_same_peak(costs: str) -> None:
    """Small blocks have operations that cost less than their Python overhead."""
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


def test_measured_costs_include_python_overhead() -> None:
    one_by_one, as_a_whole = measured_overheads()
    assert 0 < as_a_whole < one_by_one < 5e-3
    _, planner = peak_of(run_of(plain_run(style="gpt"), cost_source="measured"))
    ((blocks, _),) = planner.plans.values()
    assert blocks[0].overhead == one_by_one * len(blocks[0].tape.operations)


def test_whole_block_recompute_is_exact_without_op_tracing() -> None:
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


def test_compressed_training_learns_and_resumes_exactly() -> None:
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


def test_too_small_budget_names_the_smallest_peak() -> None:
    run = run_of(plain_run(), bytes=1e4)
    with pytest.raises(InfeasibleError, match=r"4 blocks do not fit 0\.01 MB; .* recomputed they take") as refused:
        run.backward(run.build_model(), run.objective, run.source.at(0))
    assert "techniques.memory.activation_budget.bytes=" in refused.value.fix


def test_too_small_budget_without_recompute_is_refused() -> None:
    run = run_of(plain_run(), bytes=0.1, bits=8, recompute=False)
    with pytest.raises(InfeasibleError) as refused:
        run.backward(run.build_model(), run.objective, run.source.at(0))
    assert "recompute=true" in refused.value.fix


def test_infeasible_fraction_becomes_the_smallest_peak() -> None:
    _, planner = peak_of(run_of(plain_run(), bytes=0.01))
    ((blocks, plan),) = planner.plans.values()
    assert plan.peak == least_peak(blocks)


def test_each_batch_shape_has_its_own_plan() -> None:
    plain = plain_run(style="gpt")
    records, state = run_through(
        plain, with_optimizer([technique("memory.activation_budget"), technique("curriculum.sequence_length")]), 4
    )
    assert state.model is not None
    assert len(ACTIVATION_PLANNER.of(state.model).plans) > 1  # type: ignore[union-attr]
    assert all(math.isfinite(loss) for loss in losses(records))


def test_unfrozen_parameters_and_evaluation_have_own_plans() -> None:
    plain, gradients = plain_run(style="gpt", dropout=0.3), []
    for run in (compose(plain, with_optimizer([]), 6), run_of(plain, bytes=0.5)):
        model, batch = run.build_model(), run.source.at(0)
        model.blocks.requires_grad_(False)
        run.backward(model, run.objective, batch)
        for change in (model.blocks.requires_grad_, model.eval):
            change()
            model.zero_grad()
            torch.manual_seed(0)
            run.backward(model, run.objective, batch)
            gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[2:], gradients[:2], rtol=0, atol=0)
    assert len(ACTIVATION_PLANNER.of(model).plans) == 3


class ScaledModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_run(style="gpt").build()

    def forward(self, scale: Tensor, tokens: Tensor) -> Tensor:
        return self.inner(tokens) * scale


def test_a_scalar_may_be_the_first_argument() -> None:
    model = thrifty.apply(ScaledModel(), "memory.activation_budget", cost_source="counted")
    model(torch.tensor(2.0), torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
    assert len(ACTIVATION_PLANNER.of(model).plans) == 1
    assert all(parameter.grad is not None for parameter in model.inner.blocks.parameters())


@pytest.mark.slow
def test_explain_lists_the_plan_of_each_tensor() -> None:
    plain = medium_run()
    explanation = explain(run_of(plain, bytes=0.5))
    first, *lines = explanation.decisions
    assert "blocks" in first and "if all tensors were kept" in first
    assert any("recompute; costs" in line for line in lines) and any("keep; would cost" in line for line in lines)
    before = explain(compose(plain, with_optimizer([]), 6)).footprint.activations
    assert explanation.footprint.activations < 0.55 * before


@pytest.mark.slow
def test_explained_peak_is_measured_on_hugging_face_model(tmp_path: Path) -> None:
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
def test_grouped_query_heads_are_planned_by_measured_time(offload: str) -> None:
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


def test_settings_survive_replace() -> None:
    noisy = ActivationBudget(bits=8)
    assert noisy.numerics is Numerics.DIFFERENT and replace(noisy, bits=0).numerics is Numerics.EXACT
