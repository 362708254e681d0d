"""Fixup and T-Fixup: scale of each matrix as in the papers, and Fixup's scalars."""

import math

import pytest
import torch
import torch.nn.functional as F
from stacked_models import KINDS, TOKENS, VOCABULARY, gpt
from tiny_runs import tiny_model
from torch import Tensor, nn

from thrifty.core.run_notes import collect_notes
from thrifty.optim.torch_optimizer import TransformOptimizer
from thrifty.optim.transform_elements import scale_by_learning_rate
from thrifty.techniques.initializations.fixup import Fixup, depth_factor, is_scalar
from thrifty.techniques.initializations.t_fixup import TFixup, decoder_factor, encoder_factor


def embedded_by_hand(model: nn.Module) -> Tensor:
    return model.embedding.token.weight[TOKENS] + model.embedding.position.weight[: TOKENS.shape[1]]


@pytest.mark.parametrize(
    ("branches", "count", "factor"),
    [(16, 2, 1 / 4), (16, 3, 1 / 2), (64, 4, 1 / 2), (30, 2, 30**-0.5), (1, 4, 1.0), (9, 1, 1.0)],
)
def test_fixup_factor_equals_the_paper(branches: int, count: int, factor: float) -> None:
    assert depth_factor(branches, count) == pytest.approx(factor)


def largest(values: Tensor) -> float:
    return float(values.detach().abs().max())


def assert_uniform(values: Tensor, bound: float) -> None:
    """Check values for a uniform distribution: the largest is near the bound, and the variance matches."""
    assert 0.97 * bound < largest(values) <= bound * (1 + 1e-6)
    assert float(values.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.07)


def xavier(fan_in: int, fan_out: int) -> float:
    return math.sqrt(6 / (fan_in + fan_out))


def test_fixup_scales_matrices_and_zeros_branch_ends() -> None:
    model = Fixup().model(gpt(3, tied=False))
    for block in model.blocks:
        for part in block.attention.qkv.weight.chunk(3):
            assert_uniform(part, xavier(32, 32) * 6 ** (-1 / 6))
        assert_uniform(block.mlp.up.weight, xavier(32, 64) * 6 ** (-1 / 2))
        for layer in (block.attention.out, block.mlp.down):
            assert largest(layer.weight) == 0
        for layer in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
            assert largest(layer.bias) == 0
    assert largest(model.head.weight) == 0


def test_fixup_counts_gates_and_keeps_tied_head() -> None:
    plain = tiny_model(depth=4, style="llama")
    before = plain.embedding.token.weight.detach().clone()
    with collect_notes() as notes:
        model = Fixup().model(plain)
    for part in model.blocks[0].mlp.up.weight.chunk(2):
        assert_uniform(part, xavier(32, 64) * 8 ** (-1 / 4))
    assert torch.equal(model.head.weight, before)
    assert "head is tied to the embedding and keeps its values" in notes and "L is 8" in notes


def test_fixup_counts_branches_of_encoder_and_decoder() -> None:
    with collect_notes() as notes:
        model = Fixup().model(KINDS["marian"].model())
    length = 2 * 2 + 3 * 3
    assert f"L is {length}" in notes
    for layer in (model.model.encoder.layers[0].fc1, model.model.decoder.layers[2].fc1):
        assert_uniform(layer.weight, xavier(32, 64) * length**-0.5)
    assert_uniform(model.model.decoder.layers[0].encoder_attn.k_proj.weight, xavier(32, 32) * length ** (-1 / 6))


def test_fixup_counts_separate_stacks_separately() -> None:
    model = nn.Module()
    for name, depth in (("left", 2), ("right", 8)):
        model.add_module(name, nn.Module())
        model.get_submodule(name).blocks = gpt(depth).blocks
    Fixup().model(model)
    for blocks, branches in ((model.left.blocks, 4), (model.right.blocks, 16)):
        assert_uniform(blocks[0].mlp.up.weight, xavier(32, 64) * branches**-0.5)


@torch.no_grad()
def test_fixup_scalars_shift_layers_and_scale_ends() -> None:
    torch.manual_seed(0)
    model = Fixup(multiplier=1.0).model(tiny_model(depth=2, style="gpt"))
    scalars = {name: p for name, p in model.named_parameters() if is_scalar(name, p)}
    assert len(scalars) == 2 * 7 + 1
    for name, scalar in scalars.items():
        assert scalar.shape == (1,) and scalar == (1.0 if name.endswith("gain") else 0.0)
        scalar.normal_()
    for block in model.blocks:
        block.attention.out.weight.normal_(0, 0.2)
        block.mlp.down.weight.normal_(0, 0.2)
    x = embedded_by_hand(model)
    for block in model.blocks:
        x = x + shifted_attention(x, block.attention)
        inner = F.linear(x + block.mlp.up.shift, block.mlp.up.weight) + block.mlp.up.shift_after
        inner = F.gelu(inner, approximate="tanh")
        x = x + block.mlp.down.gain * F.linear(inner + block.mlp.down.shift, block.mlp.down.weight)
    torch.testing.assert_close(model(TOKENS), x + model.norm.shift_after)


def shifted_attention(x: Tensor, attention: nn.Module) -> Tensor:
    q, k, v = F.linear(x + attention.qkv.shift, attention.qkv.weight).chunk(3, -1)
    q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q, k, v))
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    seen = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf).softmax(-1) @ v
    inner = seen.transpose(1, 2).flatten(2) + attention.out.shift
    return attention.out.gain * F.linear(inner, attention.out.weight)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_fixup_scalars_have_a_lower_rate(rate: float) -> None:
    fixup = Fixup(scalar_rate=rate)
    model = fixup.model(tiny_model(depth=2, style="gpt", tied=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = TransformOptimizer(model.named_parameters(), fixup.update(scale_by_learning_rate(0.5)))
    model.logits(TOKENS).logsumexp(-1).mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    found = dict(model.named_parameters())
    for name, gradient in gradients.items():
        share = rate if is_scalar(name, gradient) else 1.0
        torch.testing.assert_close(found[name].detach(), before[name] - 0.5 * share * gradient, msg=name)
    assert sum(is_scalar(name, gradient) for name, gradient in gradients.items()) == 15


# --- T-Fixup ----------------------------------------------------------------------------------------------------------


def test_t_fixup_factors_equal_the_paper() -> None:
    assert encoder_factor(16) == pytest.approx(0.67 / 2)
    assert decoder_factor(9) == pytest.approx(1 / 3)


def assert_normal(values: Tensor, std: float) -> None:
    assert float(values.detach().std()) == pytest.approx(std, rel=0.06)
    assert abs(float(values.detach().mean())) < 0.1 * std


def test_t_fixup_scales_encoder_and_decoder_by_their_depth() -> None:
    """Marian of transformers has 2 encoder and 3 decoder blocks, separate layers and one table."""
    model = TFixup().model(KINDS["marian"].model())
    sides = ((model.model.encoder, 0.67 * 2**-0.25), (model.model.decoder, (9 * 3) ** -0.25))
    for side, factor in sides:
        for layer in side.layers:
            attentions = [layer.self_attn, *([layer.encoder_attn] if hasattr(layer, "encoder_attn") else [])]
            for attention in attentions:
                assert_uniform(attention.q_proj.weight, xavier(32, 32))
                assert_uniform(attention.k_proj.weight, xavier(32, 32))
                assert_uniform(attention.v_proj.weight, xavier(32, 32) * factor)
                assert_uniform(attention.out_proj.weight, xavier(32, 32) * factor)
            assert_uniform(layer.fc1.weight, xavier(32, 64) * factor)
            assert_uniform(layer.fc2.weight, xavier(32, 64) * factor)
    assert_normal(model.model.shared.weight, 32**-0.5 * (9 * 2) ** -0.25)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert all(largest(p) == 0 for name, p in model.named_parameters() if name.endswith("bias") and "norm" not in name)


def test_t_fixup_splits_fused_matrices() -> None:
    model = TFixup().model(KINDS["our t5"].model())  # 3 encoder blocks, 2 decoder blocks, heads 4 wide, gated
    factor = (9 * 2) ** -0.25
    cross = model.decoder.blocks[1].cross_attention
    assert_uniform(cross.q.weight, xavier(32, 16) / math.sqrt(4))  # T5 divides its queries by sqrt(k)
    key, value = cross.kv.weight.chunk(2)
    assert_uniform(key, xavier(32, 16))
    assert_uniform(value, xavier(32, 16) * factor)
    for part in model.decoder.blocks[0].mlp.up.weight.chunk(2):
        assert_uniform(part, xavier(32, 64) * factor)
    assert_uniform(model.encoder.blocks[0].attention.qkv.weight[32:], xavier(32, 16) * 0.67 * 3**-0.25)


def test_t_fixup_of_a_decoder_uses_the_encoder_factor() -> None:
    with collect_notes() as notes:
        model = TFixup().model(gpt(4, tied=False))
    assert f"blocks uses the encoder's factor, {0.67 * 4**-0.25:.3g}" in notes
    assert_uniform(model.blocks[0].mlp.up.weight, xavier(32, 64) * 0.67 * 4**-0.25)
    assert_normal(model.embedding.token.weight, 32**-0.5 * 36**-0.25)
    assert_uniform(model.head.weight, xavier(32, VOCABULARY))
    positions = gpt(4, tied=False).embedding.position.weight
    assert torch.equal(model.embedding.position.weight, positions)


@pytest.mark.parametrize(
    ("kind", "multiplier", "expected"),
    [("our gpt", 0.0, math.sqrt(32)), ("our gpt", 3.0, 3.0), ("our marian", 0.0, 1.0), ("marian", 0.0, 1.0)],
)
@torch.no_grad()
def test_t_fixup_multiplies_tokens_by_sqrt_width_once(kind: str, multiplier: float, expected: float) -> None:
    model = TFixup(multiplier=multiplier).model(KINDS[kind].model())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for table in (table for table in tables if table.num_embeddings == VOCABULARY):
        torch.testing.assert_close(table(TOKENS), table.weight[TOKENS] * expected)


def test_t_fixup_initializes_patches_and_classifier() -> None:
    model, plain = TFixup().model(KINDS["vit"].model()), KINDS["vit"].model()
    embeddings = model.vit.embeddings
    assert_uniform(embeddings.patch_embeddings.projection.weight, xavier(3 * 4 * 4, 32))
    assert largest(model.classifier.weight) <= xavier(32, 4)
    for name in ("cls_token", "position_embeddings"):
        assert torch.equal(getattr(embeddings, name), getattr(plain.vit.embeddings, name))
