"""Rotary positions compared with complex numbers and with transformers' Llama."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thrifty.kernels.rotary_embedding import rotary_frequencies, rotary_table, rotate


def by_complex_numbers(x: torch.Tensor, base: float) -> torch.Tensor:
    """Return channels i and i + k/2 as one complex number, multiplied by exp(i · position · base^(-2i/k))."""
    *_, t, k = x.shape
    number = torch.complex(x[..., : k // 2].double(), x[..., k // 2 :].double())
    angle = torch.tensor([[p * base ** (-2 * i / k) for i in range(k // 2)] for p in range(t)], dtype=torch.float64)
    rotated = number * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((rotated.real, rotated.imag), dim=-1)


@settings(max_examples=25)
@given(t=st.integers(1, 40), half=st.integers(1, 16), base=st.sampled_from([1e2, 1e4, 5e5]), seed=st.integers(0, 99))
def test_rotation_is_multiplication_by_a_complex_number(t, half, base, seed):
    x = torch.randn(2, 3, t, 2 * half, generator=torch.Generator().manual_seed(seed))
    rotated = rotate(x, *rotary_table(rotary_frequencies(2 * half, base), t))
    torch.testing.assert_close(rotated.double(), by_complex_numbers(x, base), rtol=1e-4, atol=1e-4)


def test_scores_depend_only_on_the_distance_between_positions():
    q, k = torch.randn(16), torch.randn(16)
    cos, sin = rotary_table(rotary_frequencies(16, 1e4), 30)
    rotated_q, rotated_k = (rotate(x.expand(30, 16), cos, sin) for x in (q, k))
    scores = rotated_q @ rotated_k.t()
    for distance in (-7, 0, 11):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_rotation_equals_transformers_llama():
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_theta=10_000.0)
    q, k = torch.randn(2, 4, 50, 16), torch.randn(2, 2, 50, 16)
    theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, torch.arange(50)[None]))
    table = rotary_table(rotary_frequencies(16, 10_000.0), 50)
    torch.testing.assert_close((rotate(q, *table), rotate(k, *table)), theirs)


def test_rotation_keeps_the_input_dtype():
    assert (
        rotate(torch.randn(3, 8, dtype=torch.bfloat16), *rotary_table(rotary_frequencies(8, 1e4), 3)).dtype
        == torch.bfloat16
    )
