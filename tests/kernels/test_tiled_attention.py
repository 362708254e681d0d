"""Tiled attention compared with torch's own: values, gradients and saved memory."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.tiled_attention import causal_attention_reference, segment_mask, tiled_attention


def inputs(b: int, h: int, g: int, t: int, k: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(b, n, t, k, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for n in (h, g, g)
    ]


def output_and_gradients(attention, qkv: list[Tensor], *arguments) -> list[Tensor]:
    output = attention(*qkv, *arguments)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, qkv, weights)]


@settings(max_examples=30)
@given(
    b=st.integers(1, 2),
    g=st.integers(1, 3),
    sharing=st.integers(1, 3),
    t=st.integers(1, 50),
    k=st.integers(1, 9),
    tile=st.one_of(st.none(), st.integers(1, 60)),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_torch_for_any_shape(b, g, sharing, t, k, tile, seed):
    qkv = inputs(b, g * sharing, g, t, k, torch.float64, seed)
    tiled = output_and_gradients(tiled_attention, qkv, None, tile)
    torch.testing.assert_close(tiled, output_and_gradients(causal_attention_reference, qkv))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    g=st.integers(1, 2),
    sharing=st.integers(1, 3),
    tile=st.one_of(st.none(), st.integers(1, 30)),
)
def test_packed_texts_do_not_attend_to_each_other(sizes, g, sharing, tile):
    qkv = inputs(1, g * sharing, g, sum(sizes), 4, torch.float64)
    segments = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    mask = segment_mask(segments)
    outputs = [causal_attention_reference(*part) for part in zip(*(x.split(sizes, dim=2) for x in qkv), strict=True)]
    apart = torch.cat(outputs, dim=2)
    weights = torch.linspace(-1, 1, apart.numel(), dtype=torch.float64).view_as(apart)
    expected = [apart, *torch.autograd.grad(apart, qkv, weights)]
    torch.testing.assert_close(output_and_gradients(causal_attention_reference, qkv, mask), expected)
    torch.testing.assert_close(output_and_gradients(tiled_attention, qkv, mask, tile), expected)


@settings(max_examples=40)
@given(
    b=st.integers(1, 2),
    g=st.integers(1, 2),
    sharing=st.integers(1, 2),
    t=st.integers(1, 20),
    more=st.integers(-9, 9),
    tile=st.integers(1, 24),
    mask_shape=st.sampled_from(["none", "keys", "pairs", "heads"]),
    bias_shape=st.sampled_from(["none", "keys", "pairs", "heads"]),
    causal=st.booleans(),
    seed=st.integers(0, 99),
)
def test_masks_and_biases_have_the_effect_as_in_torch(
    b, g, sharing, t, more, tile, mask_shape, bias_shape, causal, seed
):
    s = t + abs(more) if causal else max(t + more, 1)
    h, generator = g * sharing, torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(b, heads, tokens, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for heads, tokens in ((h, t), (g, s), (g, s))
    )
    shapes = {"keys": (b, 1, 1, s), "pairs": (1, 1, t, s), "heads": (b, h, t, s)}
    mask = None if mask_shape == "none" else torch.rand(shapes[mask_shape], generator=generator) > 0.3
    if mask is not None:
        mask[..., 0] = True
    chosen = [q, k, v]
    scores = q.new_zeros(1, 1, t, s)
    if bias_shape != "none":
        bias = torch.randn(shapes[bias_shape], generator=generator, dtype=torch.float64).requires_grad_()
        chosen, scores = [*chosen, bias], bias
    seen = torch.ones(t, s, dtype=torch.bool)
    seen = seen.tril(s - t) if causal else seen
    seen = seen if mask is None else seen & mask
    added = (scores + torch.zeros(seen.shape)).masked_fill(~seen, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, added, enable_gqa=True)
    actual = tiled_attention(q, k, v, mask, tile, bias=None if bias_shape == "none" else bias, causal=causal)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, chosen, weights), torch.autograd.grad(expected, chosen, weights)
    )


def test_causal_attention_with_fewer_keys_is_refused():
    q, k, v = inputs(1, 1, 1, 6, 4, torch.float32)
    with pytest.raises(UsageError, match="no keys for 2 of 6 queries"):
        tiled_attention(q, k[:, :, :4], v[:, :, :4])


def test_a_query_without_visible_keys_has_a_zero_output():
    qkv = inputs(2, 2, 2, 6, 4, torch.float32)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[0, 0, 2] = False
    output = tiled_attention(*qkv, mask, causal=False, tile=4)
    assert output[0, :, 2].abs().max() == 0
    gradients = torch.autograd.grad(output.sum(), qkv)
    assert all(each.isfinite().all() for each in gradients) and gradients[0][0, :, 2].abs().max() == 0


def test_large_scores_do_not_overflow():
    q, k, v = inputs(1, 2, 2, 40, 8, torch.float32)
    output, *gradients = output_and_gradients(tiled_attention, [q * 1e3, k * 1e3, v], None, 16)
    assert all(tensor.isfinite().all() for tensor in (output, *gradients))


def test_products_beyond_the_range_of_float16_are_scaled_first():
    q, k = (torch.full((1, 1, 8, 64), 40.0, dtype=torch.float16, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    output, *gradients = output_and_gradients(tiled_attention, [q, k, v], None, 4)
    mean = v.detach().float().cumsum(2) / torch.arange(1, 9)[:, None]
    torch.testing.assert_close(output.float(), mean, rtol=2e-3, atol=2e-3)
    assert all(each.isfinite().all() for each in gradients)


def test_bfloat16_is_as_accurate_as_torch_kernel():
    qkv = inputs(2, 4, 2, 200, 32, torch.bfloat16)
    exact = output_and_gradients(causal_attention_reference, [x.detach().double().requires_grad_() for x in qkv])

    def errors(actual: list[Tensor]) -> list[float]:
        return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(actual, exact, strict=True)]

    ours = errors(output_and_gradients(tiled_attention, qkv))
    torchs = errors(output_and_gradients(causal_attention_reference, qkv))
    assert all(mine < max(1.5 * theirs, 5e-3) for mine, theirs in zip(ours, torchs, strict=True)), (ours, torchs)


@pytest.mark.slow
def test_compiled_equals_eager_in_values_and_gradients():
    qkv = inputs(2, 4, 2, 40, 16, torch.float32)
    compiled = torch.compile(tiled_attention, dynamic=False)
    torch.testing.assert_close(
        output_and_gradients(compiled, qkv, None, 20), output_and_gradients(tiled_attention, qkv, None, 20)
    )


def test_views_of_one_projection_are_accepted():
    projected = torch.randn(2, 30, 4 + 2 + 2, 8, dtype=torch.float64).requires_grad_()
    qkv = list(projected.transpose(1, 2).split([4, 2, 2], dim=1))
    torch.testing.assert_close(tiled_attention(*qkv, tile=8), causal_attention_reference(*qkv))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_saved_tensor_has_size_tokens_squared(compiled):
    b, h, t, k = 2, 2, 256, 16
    qkv = inputs(b, h, h, t, k, torch.bfloat16)
    attention = torch.compile(tiled_attention, dynamic=False) if compiled else tiled_attention
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(*qkv, tile=128)
    inputs_and_output, lse = 4 * b * h * t * k * 2, b * h * t * 4
    assert sum(kept.values()) <= inputs_and_output + 2 * lse < b * h * t * t


def test_meta_tensors_suffice_for_accounting():
    q = torch.empty(2, 4, 64, 8, device="meta", requires_grad=True)
    tiled_attention(q, q, q).sum().backward()
    assert q.grad.shape == q.shape


def test_second_derivative_is_refused():
    qkv = inputs(1, 1, 1, 8, 4, torch.float64)
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(tiled_attention(*qkv).sum(), qkv[0], create_graph=True)
