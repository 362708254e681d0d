"""FlashAttention's words against its closed form (oracle: theorem 2 and algorithm 1 of the paper), and its softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.kernels.flash_attention_traffic import counted_attention, flash_words, standard_words, tile_sizes


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 70), d=st.integers(1, 9), memory=st.integers(4, 600), outer=st.sampled_from(["keys", "queries"])
)
def test_counted_words_are_the_formulas_and_online_softmax_is_the_exact_one(n, d, memory, outer):
    q, k, v = torch.randn(3, n, d, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    output, lse, traffic = counted_attention(q, k, v, memory, outer)
    scores = q @ k.T * d**-0.5
    torch.testing.assert_close(output, scores.softmax(-1) @ v, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(lse[:, 0], scores.logsumexp(-1))
    assert traffic.words == flash_words(n, d, memory, outer)


def test_in_float32_online_softmax_is_exact_to_a_millionth():
    q, k, v = torch.randn(3, 128, 16, generator=torch.Generator().manual_seed(0))
    output, _, _ = counted_attention(q, k, v, 1024)
    exact = (q.double() @ k.double().T / 4).softmax(-1) @ v.double()
    assert (output - exact).abs().max() < 1e-6


def test_words_fall_with_the_memory_as_the_theorem_says():
    """N² d² / M: four times the memory, a quarter of the words; standard attention does not depend on it."""
    n, d = 4096, 64
    words = [flash_words(n, d, memory) - 2 * n * d for memory in (2**14, 2**16)]
    assert words[0] / words[1] == pytest.approx(4, rel=0.01)
    assert flash_words(n, d, 2**16) < standard_words(n, d) / 4
    assert tile_sizes(64, 2**14) == (64, 64)


def test_of_tiles_that_are_left_out_nothing_is_fetched():
    whole, half = (flash_words(1024, 64, 2**14, "keys", density) - 2 * 1024 * 64 for density in (1.0, 0.5))
    assert half == whole / 2
