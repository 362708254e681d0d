from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

from thrifty.core.errors import RefusedError, UsageError
from thrifty.core.run_notes import collect_notes
from thrifty.models.attention_layers import (
    Attention,
    CrossAttention,
    RelativePositions,
    causal_attention,
    full_attention,
    padding_mask,
    relative_bucket,
)
from thrifty.models.transformer_blocks import SinusoidalPositions, TokenEmbedding
from thrifty.techniques.attention.tiled import TiledAttention


def qkv(h=2, g=2, t=6, s=5, k=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, n, length, k, generator=generator) for n, length in ((h, t), (g, s), (g, s))]


@settings(max_examples=60)
@given(
    half=some.integers(2, 40),
    extra=some.integers(1, 300),
    causal=some.booleans(),
    offsets=some.lists(some.integers(-2000, 2000), min_size=1, max_size=40),
)
def test_distance_buckets_equal_those_of_transformers(half, extra, causal, offsets):
    offset, distance = torch.tensor(offsets), half + extra
    expected = T5Attention._relative_position_bucket(offset, not causal, 2 * half, distance)
    assert torch.equal(relative_bucket(offset, 2 * half, distance, causal), expected)


def test_relative_positions_are_causal():
    relative = RelativePositions(heads=2, buckets=8, distance=16, causal=True)
    scores = relative(6)
    assert scores.shape == (1, 2, 6, 6)
    assert torch.equal(scores[:, :, 1:, 1:], scores[:, :, :-1, :-1])
    assert torch.equal(scores[0, 0].isinf(), torch.ones(6, 6).triu(1).bool())
    assert not RelativePositions(heads=2)(6).isinf().any()


def test_a_mask_excludes_keys_from_the_softmax():
    q, k, v = qkv()
    keep = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()
    output = full_attention(q, k, v, padding_mask(keep))
    for row in range(3):
        seen = keep[row]
        expected = full_attention(q[row : row + 1], k[row : row + 1, :, seen], v[row : row + 1, :, seen])
        torch.testing.assert_close(output[row : row + 1], expected)


def test_unscaled_attention():
    q, k, v = qkv()
    expected = (q @ k.transpose(-1, -2)).softmax(-1) @ v
    torch.testing.assert_close(full_attention(q, k, v, scale=1.0), expected)


def test_cross_attention_equals_torch_multi_head_attention():
    ours, theirs = CrossAttention(8, heads=2, bias=True), nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        ours.q.weight.copy_(theirs.in_proj_weight[:8])
        ours.kv.weight.copy_(theirs.in_proj_weight[8:])
        ours.out.weight.copy_(theirs.out_proj.weight)
        for linear in (ours.q, ours.kv, ours.out, theirs.out_proj):
            linear.bias.zero_()
    x, memory = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    keep = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    expected, _ = theirs(x, memory, memory, key_padding_mask=~keep)
    torch.testing.assert_close(ours(x, memory, padding_mask(keep)), expected)


def test_heads_may_exceed_the_width_of_the_model():
    attention = Attention(8, heads=2, head_width=12)
    assert attention.qkv.parts == {"q": 24, "k": 24, "v": 24} and attention.out.weight.shape == (8, 24)
    assert attention(torch.randn(1, 3, 8)).shape == (1, 3, 8)


def test_any_core_with_the_same_shapes_can_be_used():
    attention = Attention(8, heads=4, kv_heads=2)
    attention.core = lambda q, k, v: v.repeat_interleave(2, dim=1)
    x = torch.randn(1, 3, 8)
    expected = attention.out(attention.qkv(x)[..., 12:].unflatten(-1, (2, 2)).repeat_interleave(2, dim=2).flatten(2))
    torch.testing.assert_close(attention(x), expected)


def test_only_plain_cores_are_tiled():
    cores = [causal_attention, full_attention, partial(full_attention, scale=1.0), causal_attention]
    model = nn.ModuleList([*(Attention(8, heads=2, core=core) for core in cores), CrossAttention(8, heads=2)])
    TiledAttention().model(model)
    assert [attention.core is core for attention, core in zip(model, cores, strict=False)] == [
        False,
        False,
        True,
        False,
    ]
    assert model[4].core is full_attention


def test_optional_tiling_notes_a_model_without_attention():
    model = nn.ModuleList([Attention(8, heads=2, core=full_attention)])
    with collect_notes() as notes:
        TiledAttention(optional=True).model(model)
    assert model[0].core is full_attention
    assert "unchanged" in "".join(notes)


def test_the_kernel_in_triton_is_refused_away_from_a_gpu():
    with pytest.raises(RefusedError, match="the model is on 'cpu'") as refused:
        TiledAttention(kernel="triton").model(nn.ModuleList([Attention(8, heads=2)]))
    assert refused.value.fix == "--set techniques.attention.tiled.kernel=torch"


def test_sinusoids_equal_the_original_transformer():
    positions = SinusoidalPositions(length=50, width=6)(torch.tensor([7, 49]))
    for row, position in enumerate((7, 49)):
        for pair in range(3):
            angle = torch.tensor(position / 10_000 ** (2 * pair / 6), dtype=torch.float64)
            torch.testing.assert_close(
                positions[row, [pair, 3 + pair]], torch.stack((angle.sin(), angle.cos())).float()
            )


def test_embedding_scale_excludes_positions():
    embedding = TokenEmbedding(10, 4, SinusoidalPositions(5, 4), scale=3.0)
    tokens = torch.tensor([[1, 2]])
    expected = 3 * embedding.token(tokens) + embedding.position(torch.arange(2))
    assert torch.equal(embedding(tokens), expected)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(UsageError, match="6 tokens exceed this model's limit of 5"):
        TokenEmbedding(10, 4, SinusoidalPositions(5, 4))(torch.zeros(1, 6, dtype=torch.long))
