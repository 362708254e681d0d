"""Bottleneck adapters: formula, positions and trained parameters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from adapter_models import TOKENS, theirs
from stacked_models import KINDS
from tiny_runs import advance, plain_run, technique, tiny_model
from torch import nn

from thrifty.composition.compose import compose
from thrifty.modeling.residual_branches import find_branches
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize
from thrifty.techniques.adapters.bottleneck import PARTS, BottleneckAdapter, apply_bottleneck


def trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_the_formula_equals_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w1, b1, w2, b2 = (torch.randn(s, generator=generator) for s in ((2, 3, 8), (4, 8), (4,), (8, 4), (8,)))
    torch.testing.assert_close(apply_bottleneck(x, w1, b1, w2, b2), x + F.gelu(x @ w1.T + b1) @ w2.T + b2)


def test_initial_values_are_truncated_normal_with_zero_biases() -> None:
    model = BottleneckAdapter(width=64).model(tiny_model())
    for name, parameter in model.named_parameters():
        if name.endswith(("adapter_down", "adapter_up")):
            assert parameter.abs().max() <= 2e-3 and 0.7e-3 < parameter.std() < 1e-3  # 0.88 of 1e-3 once cut at two
        elif name.endswith("_bias"):
            assert not parameter.any()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_function_is_nearly_frozen_at_first(kind: str) -> None:
    plain = KINDS[kind].loss(KINDS[kind].model())
    model = BottleneckAdapter(width=8).model(KINDS[kind].model())
    loss = KINDS[kind].loss(model)
    assert abs(loss - plain) < 1e-3 * plain
    loss.backward()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(10):
        optimizer.step()
        optimizer.zero_grad()
        loss = KINDS[kind].loss(model)
        loss.backward()
    assert loss < plain - 0.01
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith(PARTS))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize(("placement", "count"), [("both", 4), ("feed_forward", 2)])
def test_adapters_follow_the_last_layer_of_each_branch(kind: str, placement: str, count: int) -> None:
    model = theirs(kind)
    seen: list[str] = []
    BottleneckAdapter(width=8, placement=placement).model(model)  # type: ignore[arg-type]
    owners = [name.rpartition(".")[0] for name in trained(model) if name.endswith("adapter_up")]
    assert len(owners) == count
    ends = {"gpt2": ("attn.c_proj", "mlp.c_proj"), "llama": ("self_attn.o_proj", "mlp.down_proj")}[kind]
    assert all(name.endswith(ends if placement == "both" else ends[1:]) for name in owners)
    before = model(TOKENS).logits
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("adapter_up_bias"):
                parameter.add_(torch.linspace(-1, 1, 32))
                seen.append(name)
    assert len(seen) == count and (model(TOKENS).logits - before).abs().max() > 1e-2


def test_the_adapter_precedes_the_sum_of_a_post_norm_block() -> None:
    model = assemble(ModelConfig("bert", 1, 32, 4, 4, 64, 300, 32, True))
    initialize(model, 0)
    BottleneckAdapter(width=8).model(model)
    with torch.no_grad():  # the norm of the sum removes a constant
        model.blocks[0].mlp.down.adapter_up_bias.fill_(3.0)
    changed = model(TOKENS)
    with torch.no_grad():
        model.blocks[0].mlp.down.adapter_up_bias.zero_()
    torch.testing.assert_close(model(TOKENS), changed, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ({}, lambda name: "norm" in name),
        ({"norms": False}, lambda name: False),
        ({"head": True}, lambda name: "norm" in name or name == "head.weight"),
    ],
)
def test_adapters_norms_and_head_are_trained_as_set(settings: dict, others: Callable[[str], bool]) -> None:
    model = BottleneckAdapter(width=8, **settings).model(tiny_model(tied=False, style="gpt"))
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name.endswith(PARTS) or others(name)), name


def test_a_tied_head_stays_with_the_frozen_embedding() -> None:
    model = BottleneckAdapter(width=8, head=True).model(tiny_model())
    assert "embedding.token.weight" not in trained(model)


def test_frozen_weights_are_unchanged() -> None:
    run = compose(plain_run(), [technique("adapters.bottleneck"), technique("optimizers.adamw")], 4)
    state = run.start()
    advance(run, state)
    assert state.model is not None
    now = dict(state.model.named_parameters())
    for name, value in plain_run().build().named_parameters():
        assert torch.equal(now[name], value) != ("norm" in name)
    assert len(find_branches(state.model)["blocks"]) == 4  # its parameters do not hide the branches
