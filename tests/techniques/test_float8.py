"""Float8 training: treated layers, scales, and combinations with other techniques."""

import math
from statistics import fmean
from typing import Any

import pytest
import torch
from parallel_work import train_with_each
from rank_processes import on_ranks
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
    tiny_model,
    with_optimizer,
)
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.explain import explain
from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.run_notes import collect_notes
from thrifty.core.state import TrainState
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import PackedTokens
from thrifty.kernels.float8 import E4M3, E5M2, cast_float8, dequantize_float8
from thrifty.kernels.float8_linear import GRADIENT, CastRule
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.precision.float8 import CASTING, Float8, remove_float8, roll, use_float8

TOKENS = torch.arange(16)[None]


def treated(model: nn.Module) -> list[str]:
    return [name for name, _ in CASTING.noted(model)]


def started(*chosen: Technique, steps: int = 4, **plain: Any) -> tuple[Run, TrainState, nn.Module]:
    run = compose(plain_run(**plain), with_optimizer(list(chosen)), steps)
    state = run.start()
    assert state.model is not None
    return run, state, state.model


def scales_of(model: nn.Module) -> Tensor:
    return torch.stack([model.get_submodule(name).float8_scales for name in treated(model)])


def test_inner_blocks_are_treated() -> None:
    with collect_notes() as notes:
        model = Float8().model(tiny_model(depth=4))
    layers = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert treated(model) == [f"blocks.{block}.{layer}" for block in (1, 2) for layer in layers]
    text = " ".join(notes)
    assert "8 of 17 modules" in text and "skipped head: it is outside the blocks" in text
    assert "blocks.0 is skipped as the first block" in text and "blocks.3 is skipped as the last block" in text
    assert len(treated(Float8(skip_end_blocks=False).model(tiny_model(depth=4)))) == 16
    assert len(treated(Float8().model(tiny_model(depth=2)))) == 8  # a stack of two has no inner blocks
    assert treated(Float8(where="up").model(tiny_model(depth=3))) == ["blocks.1.mlp.up"]


def test_skipped_layers_are_listed_with_reasons() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    def block() -> nn.Module:
        attention = nn.MultiheadAttention(32, 2)
        return nn.ModuleDict(
            {"fits": nn.Linear(32, 64), "narrow": nn.Linear(32, 40), "odd": Odd(32, 32), "a": attention}
        )

    model = nn.ModuleDict({"blocks": nn.ModuleList(block() for _ in range(2))})
    with collect_notes() as notes:
        Float8().model(model)
    assert treated(model) == ["blocks.0.fits", "blocks.1.fits"]
    text = " ".join(notes)
    assert "blocks.0.narrow: its widths 40 and 32 are not both multiples of 16" in text
    assert "blocks.1.odd: the product of a Odd is unknown" in text
    assert "blocks.0.a.out_proj: its attention reads the weight directly" in text
    with pytest.raises(RefusedError, match="no list of equal blocks"):
        Float8().model(nn.Sequential(nn.Linear(32, 32), nn.ReLU()))
    with pytest.raises(RefusedError, match="no module matches 'nowhere'"):
        Float8(where="nowhere").model(tiny_model(depth=2))


def test_row_granularity_with_delayed_scales_is_refused() -> None:
    with pytest.raises(UsageError, match="granularity 'row' has no history") as refused:
        Float8(granularity="row")
    assert "scaling=current" in refused.value.fix


def test_layer_multiplies_quantized_values() -> None:
    layer, x = nn.Linear(32, 48), torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    use_float8(layer, CastRule(), history=4)
    with torch.no_grad():
        layer.float8_scales.copy_(torch.tensor([30.0, 1000.0, 5.0]))
    given = x.clone().requires_grad_()
    gradient = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    found = layer(given)
    found.backward(gradient)
    scales = layer.float8_scales
    a, w, g = (
        dequantize_float8(cast_float8(numbers.detach(), scale, form), scale).double()
        for numbers, scale, form in zip((x, layer.weight, gradient), scales, (E4M3, E4M3, E5M2), strict=True)
    )
    torch.testing.assert_close(found.double(), a @ w.T + layer.bias.double(), rtol=1e-5, atol=1e-5)
    assert given.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    torch.testing.assert_close(given.grad.double(), g @ w, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad.double(), g.T @ a, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.bias.grad, gradient.sum(0))  # in high precision
    assert torch.equal(layer.eval()(x), nn.functional.linear(x, layer.weight, layer.bias))
    remove_float8(layer)
    assert list(layer.state_dict()) == ["weight", "bias"] and "forward" not in vars(layer)


def test_conv1d_is_treated() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(conv1d(48, 32)) for _ in range(2))})
    Float8(scaling="current").model(model)
    convolution, linear = model.get_submodule("blocks.0.0"), nn.Linear(32, 48)
    with torch.no_grad():
        linear.weight.copy_(convolution.weight.T)
        linear.bias.copy_(convolution.bias)
    use_float8(linear, CastRule())
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(convolution(x), linear(x))
    for layer in (convolution, linear):
        layer(x).square().sum().backward()
    assert torch.equal(convolution.weight.grad.T, linear.weight.grad)


def test_scales_follow_all_micro_batches_once_a_step() -> None:
    for parts in (1, 4):
        chosen = [Float8(history=3)] + (
            [technique("large_batch.gradient_accumulation", micro_batches=parts)] if parts > 1 else []
        )
        run, state, model = started(*chosen)
        inputs: list[Tensor] = []
        layer = model.get_submodule("blocks.1.mlp.up")
        hook = layer.register_forward_pre_hook(lambda layer, args, inputs=inputs: inputs.append(args[0].detach()))
        advance(run, state, 1)
        hook.remove()
        assert len(inputs) == parts
        assert torch.equal(layer.float8_history[:, 1:], torch.zeros(3, 2))  # one entry per step, not per micro-batch
        largest = max(float(x.abs().max()) for x in inputs)
        assert float(layer.float8_history[0, 0]) == largest
        assert float(layer.float8_scales[0]) == pytest.approx(448 / largest)
        advance(run, state, 2)
        assert float(layer.float8_history[0, 1]) == largest and not layer.float8_history[:, 2].any()


def test_evaluation_does_not_change_scales() -> None:
    run, state, model = started(Float8())
    advance(run, state, 2)
    before = snapshot(state)
    model.train()
    with torch.no_grad():
        model(TOKENS * 3)
    model.eval()
    model(TOKENS)
    assert_same(snapshot(state), before)
    advance(run, state, 4)
    straight, again, _ = started(Float8())
    advance(straight, again, 4)
    assert_same(snapshot(state), snapshot(again))


def test_margin_or_current_scaling_prevents_clipping() -> None:
    errors = {}
    for name, margin, history in (("delayed", 0, 8), ("margin", 3, 8), ("current", 0, 0)):
        layer = nn.Linear(64, 64, bias=False)
        use_float8(layer, CastRule(margin=margin), history)
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        layer(x).sum().backward()
        if history:
            roll([layer])
        grown = x.detach() * 6
        exact = nn.functional.linear(grown, layer.weight)
        errors[name] = float(((layer(grown) - exact).norm() / exact.norm()).detach())
    assert errors["delayed"] > 0.3 > 0.05 > max(errors["margin"], errors["current"])


def test_doubled_loss_scale_does_not_clip_gradients() -> None:
    scaled = technique("precision.mixed", format="float16", init_scale=256.0, growth_interval=2)
    run, _, model = started(technique("precision.float8", history=4), scaled)
    layers = [module for module in model.modules() if hasattr(module, "float8_seen")]
    factors = []
    for step in range(6):  # a repeated step
        before = scales_of(model)[:, GRADIENT]
        model.zero_grad()
        factors.append(run.backward(model, run.objective, run.source.at(0)).notes["loss_scale"])
        seen = torch.stack([layer.float8_seen[GRADIENT] for layer in layers])
        assert step == 0 or (before * seen <= 57344 * 1.001).all(), step
        assert step == 0 or (before * seen >= 57344 * 0.4).all(), step
    assert factors == [256, 256, 512, 512, 1024, 1024]


def test_nan_reaches_the_loss_but_not_the_history() -> None:
    run, state, model = started(Float8(), steps=3)
    advance(run, state, 1)
    weight = model.get_submodule("blocks.0.mlp.down").weight  # of a layer before the float8 layers
    known = scales_of(model)
    with torch.no_grad():
        kept = weight[0, 0].clone()
        weight[0, 0] = math.inf
    (record,) = advance(run, state, 2)
    assert record.skipped and not math.isfinite(record.loss)
    assert torch.equal(scales_of(model)[:, 0], known[:, 0])
    with torch.no_grad():
        weight[0, 0] = kept
    (record,) = advance(run, state, 3)
    assert not record.skipped and all(tensor.isfinite().all() for tensor in state.tensors().values())


@pytest.mark.parametrize("settings", [{}, {"scaling": "current", "granularity": "row"}], ids=["delayed", "row"])
def test_recompute_is_exact(settings: dict[str, Any]) -> None:
    plain, float8 = plain_run(dropout=0.3, style="gpt"), Float8(**settings)
    _, expected = run_through(plain, with_optimizer([float8]), 4)
    _, state = run_through(plain, with_optimizer([float8, technique("memory.recompute")]), 4)
    assert_same(snapshot(state), snapshot(expected))


@pytest.mark.slow
def test_compiled_blocks_are_exact() -> None:
    torch._dynamo.reset()
    wanted, expected = run_through(plain_run(), with_optimizer([Float8()]), 4)
    found, state = run_through(plain_run(), with_optimizer([Float8(), technique("compile")]), 4)
    assert losses(found) == pytest.approx(losses(wanted), rel=1e-4)
    assert state.model is not None and expected.model is not None
    torch.testing.assert_close(scales_of(state.model), scales_of(expected.model), rtol=0.05, atol=0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_combines_with_mixed_precision(format: str) -> None:
    mixed = technique("precision.mixed", format=format)
    seen: list[torch.dtype] = []
    run, state, model = started(Float8(), mixed, steps=40, repeated=True)
    model.get_submodule("blocks.1.mlp.up").register_forward_hook(lambda layer, args, out: seen.append(out.dtype))
    records = advance(run, state)
    assert set(seen) == {getattr(torch, format)}
    both, _ = run_through(plain_run(repeated=True), with_optimizer([mixed]), 40)
    assert losses(records)[-1] == pytest.approx(losses(both)[-1], abs=0.15)


def test_lora_is_added_to_float8_products() -> None:
    lora = technique("adapters.lora", where="mlp")
    run, state, model = started(Float8(), lora, steps=6)
    alone = Float8().model(tiny_model())
    assert torch.equal(model.train()(TOKENS), alone.train()(TOKENS))  # B is zero
    before = {name: value.clone() for name, value in model.named_parameters()}
    advance(run, state)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) != name.endswith(("lora_a", "lora_b")), name
    plain = model
    for each in reversed(run.techniques):
        plain = each.finish(plain)
    assert list(plain.state_dict()) == list(tiny_model().state_dict())
    assert not any("forward" in vars(module) for module in plain.modules())


def test_grown_blocks_copy_histories() -> None:
    run = compose(plain_run(), with_optimizer([Float8(), technique("growth.stacking", at=(2,))]), 4)
    state = run.start()
    advance(run, state, 2)
    assert state.model is not None
    before = {name: buffer.clone() for name, buffer in state.model.named_buffers() if "float8" in name}
    saved = snapshot(state)
    run.changes(state)
    grown = {name: buffer for name, buffer in state.model.named_buffers() if "float8" in name}
    assert torch.equal(grown["blocks.2.mlp.up.float8_history"], before["blocks.0.mlp.up.float8_history"]) and any(
        buffer.any() for buffer in before.values()
    )
    resumed = restored(run, saved)
    advance(run, resumed)
    advance(run, state)
    assert_same(snapshot(resumed), snapshot(state))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["parallelism.replicate", "parallelism.shard"])
def test_two_ranks_have_equal_scales(strategy: str) -> None:
    name = "precision.float8"
    first, second = (found[name] for found in on_ranks(2, train_with_each, [technique(strategy)], [name]))
    assert first.tensors == second.tensors and first.losses == second.losses
    assert sum("float8_scales" in tensor for tensor in first.tensors) == 8
    alone, _ = run_through(plain_run(), with_optimizer([technique(name)]), 4)
    # without a history each rank uses its own part of the batch
    assert first.losses == pytest.approx(losses(alone), rel=1e-2)


def test_explain_counts_float8_activations() -> None:
    explained = explain(compose(plain_run(), with_optimizer([Float8(skip_end_blocks=False)]), 2))
    rows, width, inner, depth = 4 * 16, 32, 64, 4
    # in each block the outputs of two norms and the input of the last layer shrink from 4 bytes per element to 1;
    # attention saves its own result in addition to the float8 values
    saved = depth * rows * (3 * (2 * width + inner) - width)
    found = explained.plain.activations - explained.footprint.activations
    assert found == pytest.approx(saved, rel=0.01)


def final_loss(seed: int, *chosen: Technique) -> float:
    """Return the mean loss of the last 20 of 80 steps of a tiny text model."""
    plain = BaseRun(tiny_model, PackedTokens(corpus(), 16, 8, seed), NextToken())
    records, _ = run_through(plain, with_optimizer(list(chosen)), 80)
    return fmean(losses(records)[-20:])


@pytest.mark.slow
def test_training_ends_within_bfloat16_noise() -> None:
    mixed, seeds = technique("precision.mixed"), range(2)
    wanted = [final_loss(seed, mixed) for seed in seeds]
    noise = max(max(wanted) - min(wanted), 0.05)
    for settings in ({}, {"scaling": "current", "granularity": "row"}):
        found = [final_loss(seed, mixed, Float8(skip_end_blocks=False, **settings)) for seed in seeds]
        assert abs(fmean(found) - fmean(wanted)) < noise, settings
