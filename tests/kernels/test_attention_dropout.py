"""Dropout of attention weights: the same weights in every kernel, and gradients of the dropped weights."""

import pytest
import torch
from torch import Tensor

from thrifty.kernels import tiled_attention
from thrifty.kernels.attention_dropout import dropout_factors
from thrifty.kernels.sparse_attention import block_attention, row_attention
from thrifty.kernels.sparse_attention.block_grid import window_grid
from thrifty.kernels.sparse_attention.visibility import VisibilityRule

SEED, RATE, B, H, G, T, K = 1234567, 0.3, 2, 4, 2, 24, 8


@pytest.fixture(autouse=True)
def known_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiled_attention, block_attention, row_attention):
        monkeypatch.setattr(module, "draw_seed", lambda device: torch.tensor([SEED]))


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention with dropped weights, from the formula."""
    k, v = (each.repeat_interleave(H // G, 1) for each in (k, v))
    weights = (q @ k.mT * K**-0.5).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    heads, tokens = torch.arange(B * H).view(B, H, 1, 1), torch.arange(T)
    return (weights * dropout_factors(torch.tensor([SEED]), RATE, heads, tokens[:, None], tokens)) @ v


def by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grid = window_grid(T, VisibilityRule(causal=True), 8, q.device)
    return block_attention.block_attention(q, k, v, grid, dropout=RATE)


def by_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keys = torch.arange(T).expand(T, T).masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), -1)
    return row_attention.row_attention(q, k, v, keys[None, None], dropout=RATE)


def by_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tiled_attention.tiled_attention(q, k, v, tile=8, dropout=RATE)


def compiled_tiles(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.compile(by_tiles, backend="aot_eager")(q, k, v)


@pytest.mark.parametrize("kernel", [by_blocks, by_rows, by_tiles, compiled_tiles], ids=lambda each: each.__name__)
def test_outputs_and_gradients_equal_the_formula(kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    results = []
    for attention in (dense, kernel):
        generator.manual_seed(0)
        inputs = [torch.randn(B, n, T, K, generator=generator, requires_grad=True) for n in (H, G, G)]
        out = attention(*inputs)
        (out * torch.randn(out.shape, generator=generator)).sum().backward()
        results.append([out.detach(), *(each.grad for each in inputs)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_factors_are_independent_with_the_given_rate() -> None:
    heads, queries, keys = torch.arange(8)[:, None, None], torch.arange(128)[:, None], torch.arange(128)
    for seed in (0, 1, 2**61):
        factors = dropout_factors(torch.tensor([seed]), RATE, heads, queries, keys)
        kept = (factors > 0).double()
        assert torch.equal(factors.unique(), torch.tensor([0, 1 / (1 - RATE)]))
        deviation = (RATE * (1 - RATE)) ** 0.5
        assert abs(kept.mean() - (1 - RATE)) < 4 * deviation / kept.numel() ** 0.5
        for dim in range(3):  # neighbors along each dimension
            moved = (kept - kept.mean()) * (kept.roll(1, dim) - kept.mean())
            assert abs(moved.mean()) < 5 * deviation**2 / kept.numel() ** 0.5
            means = kept.mean([other for other in range(3) if other != dim])
            assert means.std() < 1.6 * deviation / (kept.numel() / len(means)) ** 0.5
    other = dropout_factors(torch.tensor([3]), RATE, heads, queries, keys)
    assert 0.5 < (other == factors).double().mean() < 0.65
