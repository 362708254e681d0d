"""Visibility of tokens and position of norms in decoders, encoders and encoder-decoders, pre-norm and post-norm."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from thrifty.core.recipe import ModelSettings
from thrifty.modeling.module_surgery import wrap_forward
from thrifty.models import build_model
from thrifty.models.attention_layers import Attention, CrossAttention, causal_attention, full_attention
from thrifty.models.transformer import BlockStack, Encoder, EncoderDecoder, Transformer, initialize
from thrifty.models.transformer_blocks import FeedForward, PostNormBlock, TokenEmbedding, TransformerBlock

WIDTH, VOCABULARY = 16, 30
NORM = partial(nn.LayerNorm, WIDTH)
BOTH = pytest.mark.parametrize("kind", [TransformerBlock, PostNormBlock])


def block(kind, core, cross=False):
    over_memory = (NORM(), CrossAttention(WIDTH, 2)) if cross else ()
    mlp = FeedForward(WIDTH, 32, nn.GELU())
    return kind(NORM(), Attention(WIDTH, 2, core=core), NORM(), mlp, *over_memory)


def ends(kind):
    """Return the module after the last block: post-norm blocks need no final norm."""
    return nn.Identity() if kind is PostNormBlock else NORM()


def decoder(kind, core=causal_attention):
    blocks = [block(kind, core) for _ in range(3)]
    return started(Transformer(embedding(), blocks, ends(kind), nn.Linear(WIDTH, VOCABULARY)))


def encoder(kind):
    blocks = [block(kind, full_attention) for _ in range(3)]
    return started(Encoder(embedding(), blocks, ends(kind), nn.Linear(WIDTH, VOCABULARY)))


def encoder_decoder(kind):
    sides = [
        BlockStack([block(kind, core, cross) for _ in range(2)], ends(kind))
        for core, cross in ((full_attention, False), (causal_attention, True))
    ]
    return started(EncoderDecoder(embedding(), *sides, nn.Linear(WIDTH, VOCABULARY)))


def embedding():
    return TokenEmbedding(VOCABULARY, WIDTH, nn.Embedding(12, WIDTH))


def started(model):
    initialize(model, seed=0, std=0.3)
    return model.eval()


def tokens(length=8, seed=0):
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def changed(given, place):
    other = given.clone()
    other[:, place] = (other[:, place] + 1) % VOCABULARY
    return other


def moved(before, after):
    """Return the positions (t,) at which any hidden state differs."""
    return (before != after).any(-1).any(0)


@BOTH
def test_a_decoder_token_attends_to_itself_and_its_past(kind):
    model, given = decoder(kind), tokens()
    assert moved(model(given), model(changed(given, 3))).tolist() == [False] * 3 + [True] * 5


@BOTH
def test_an_encoder_token_attends_to_all(kind):
    model, given = encoder(kind), tokens()
    assert moved(model(given), model(changed(given, 3))).all()


@BOTH
def test_the_core_determines_visibility(kind):
    assert moved(decoder(kind, full_attention)(tokens()), decoder(kind, full_attention)(changed(tokens(), 7))).all()


@BOTH
def test_a_target_attends_to_the_source_and_its_own_past(kind):
    model, source, target = encoder_decoder(kind), tokens(9, seed=1), tokens(6)
    before = model(source, target)
    assert moved(before, model(changed(source, 8), target)).all()
    assert moved(before, model(source, changed(target, 2))).tolist() == [False] * 2 + [True] * 4


@BOTH
def test_padding_of_an_encoder_changes_nothing(kind):
    model, given = encoder(kind), tokens()
    keep = torch.ones(2, 8, dtype=torch.bool)
    keep[:, 6:] = False
    before = model(given, keep)[:, :6]
    assert torch.equal(before, model(changed(given, 7), keep)[:, :6])
    torch.testing.assert_close(before, model(given[:, :6]))
    torch.testing.assert_close(model(given, torch.ones_like(keep)), model(given))


@pytest.mark.parametrize("preset", ["t5-nano", "marian-nano"])
def test_padding_of_a_source_changes_nothing(preset):
    settings = ModelSettings(preset=preset, width=32, depth=2)
    model = build_model(settings, VOCABULARY, 12, seed=0, task="sequence_to_sequence").eval()
    source, target, keep = tokens(), tokens(5, seed=1), torch.ones(2, 8, dtype=torch.bool)
    keep[:, 6:] = False
    before = model(source, target, keep)
    assert torch.equal(before, model(changed(source, 7), target, keep))
    assert not torch.equal(before, model(changed(source, 7), target))
    torch.testing.assert_close(before, model(source[:, :6], target))


def silent(model):
    """Set the output of every branch to zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".out." in name or ".down." in name:
                parameter.zero_()
    return model


def test_a_pre_norm_block_without_branches_is_the_identity():
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH)
    assert torch.equal(silent(block(TransformerBlock, full_attention, cross=True))(x, None, memory), x)


def test_a_post_norm_block_without_branches_normalizes():
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 3, WIDTH)
    output = silent(block(PostNormBlock, full_attention, cross=True))(x, None, memory)
    torch.testing.assert_close(output, nn.functional.layer_norm(x, (WIDTH,)), rtol=1e-4, atol=1e-4)


def test_only_post_norm_blocks_have_outputs_of_unit_variance():
    spreads = {}
    for kind in (TransformerBlock, PostNormBlock):
        model, seen = decoder(kind), []
        for each in model.blocks:
            each.register_forward_hook(lambda module, given, out, seen=seen: seen.append(out.var(-1).mean().item()))
        model(tokens())
        spreads[kind] = seen
    assert (
        spreads[TransformerBlock] == sorted(spreads[TransformerBlock])
        and spreads[TransformerBlock][-1] > 2 * spreads[TransformerBlock][0]
    )
    assert all(spread == pytest.approx(16 / 15, rel=1e-2) for spread in spreads[PostNormBlock])


def test_gpt1_is_gpt_with_norms_after_the_sums():
    pre, post = (
        build_model(ModelSettings(preset=name, depth=24), 50, 16, seed=0) for name in ("gpt-nano", "gpt1-nano")
    )
    assert [type(block) for block in pre.blocks] == [TransformerBlock] * 24
    assert [type(block) for block in post.blocks] == [PostNormBlock] * 24
    shared = {name: tuple(p.shape) for name, p in post.named_parameters()}
    assert {name: tuple(p.shape) for name, p in pre.named_parameters()} == shared | {
        "norm.weight": (128,),
        "norm.bias": (128,),
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["recompute", "compile"])
@pytest.mark.parametrize("preset", ["bert-nano", "t5-nano", "marian-nano"])
def test_wrapped_or_compiled_blocks_compute_the_same(preset, how):
    torch._dynamo.reset()
    settings = ModelSettings(preset=preset, width=32, depth=2)
    task = "masked_token" if preset == "bert-nano" else "sequence_to_sequence"
    gradients = []
    for changed_blocks in (False, True):
        model = build_model(settings, VOCABULARY, 12, seed=0, task=task)
        stacks = [model.blocks] if task == "masked_token" else [model.encoder.blocks, model.decoder.blocks]
        for each in (each for stack in stacks for each in stack if changed_blocks):
            if how == "compile":
                each.compile(backend="aot_eager")
            else:
                wrap_forward(each, lambda module, inner, *given: checkpoint(inner, *given, use_reentrant=False))
        keep = torch.tensor([[True] * 6 + [False] * 2, [True] * 8])
        given = (tokens(), keep) if task == "masked_token" else (tokens(), tokens(5, seed=1), keep)
        model.logits(*given).logsumexp(-1).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0].values())
