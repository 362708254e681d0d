"""Image patches and token gathering compared with plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thrifty.kernels.image_patches import (
    blank_patches,
    match_brightness,
    patchify,
    sinusoids_2d,
    standardize_patches,
    unpatchify,
)
from thrifty.kernels.token_gather import gather_tokens, scatter_tokens

PICTURES = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(0))


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99)
)
def test_unpatchify_inverts_patchify(b: int, c: int, patch: int, rows: int, columns: int, seed: int):
    pictures = torch.rand(b, c, rows * patch, columns * patch, generator=torch.Generator().manual_seed(seed))
    pixels = patchify(pictures, patch)
    assert pixels.shape == (b, rows * columns, patch * patch * c)
    assert torch.equal(unpatchify(pixels, patch, rows * patch, columns * patch), pictures)


def test_patches_and_pixels_are_row_major_with_channels_last():
    pixels = patchify(PICTURES, 4)
    for place in range(6):
        row, column = divmod(place, 3)
        for y in range(4):
            for x in range(4):
                expected = PICTURES[:, :, 4 * row + y, 4 * column + x]
                assert torch.equal(pixels[:, place, 3 * (4 * y + x) : 3 * (4 * y + x) + 3], expected)


def test_patches_are_standardized_by_their_unbiased_variance():
    pixels = patchify(PICTURES, 4)
    actual, values = standardize_patches(pixels), pixels.double().numpy()
    expected = (values - values.mean(-1, keepdims=True)) / np.sqrt(values.var(-1, ddof=1, keepdims=True) + 1e-6)
    torch.testing.assert_close(actual.double(), torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
    assert not standardize_patches(torch.full((1, 1, 12), 0.3)).abs().max() > 1e-3  # a constant patch


def test_match_brightness_inverts_standardization():
    pixels = 3 * patchify(PICTURES, 4) + 2
    torch.testing.assert_close(match_brightness(standardize_patches(pixels), pixels), pixels)
    flat = match_brightness(torch.zeros_like(pixels), pixels)
    torch.testing.assert_close(flat, pixels.mean(-1, keepdim=True).expand_as(pixels))


@given(st.integers(1, 3), st.integers(2, 12), st.integers(0, 99), st.data())
def test_scatter_tokens_inverts_gather_tokens(b: int, total: int, seed: int, data: st.DataObject):
    count = data.draw(st.integers(1, total))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(b, total, 5, generator=generator)
    places = torch.rand(b, total, generator=generator).argsort(1)[:, :count]  # in any order
    absent = torch.randn(1, 1, 5, generator=generator)
    actual = scatter_tokens(gather_tokens(tokens, places), places, absent, total)
    for row in range(b):
        seen = set(places[row].tolist())
        for place in range(total):
            assert torch.equal(actual[row, place], tokens[row, place] if place in seen else absent[0, 0])


def test_gradient_of_absent_token_is_summed_over_positions():
    absent = torch.zeros(1, 1, 2, requires_grad=True)
    scatter_tokens(torch.ones(3, 4, 2), torch.arange(4).expand(3, -1), absent, 10).sum().backward()
    assert absent.grad is not None and absent.grad.tolist() == [[[18.0, 18.0]]]  # 3 rows of 6


def test_blank_patches_are_zero_and_visible_ones_unchanged():
    visible = torch.tensor([[0, 5], [2, 3]])
    pixels, actual = patchify(PICTURES, 4), patchify(blank_patches(PICTURES, visible, 4), 4)
    for row in range(2):
        for place in range(6):
            expected = pixels[row, place] if place in visible[row] else torch.zeros(48)
            assert torch.equal(actual[row, place], expected)


def test_sinusoids_encode_the_column_then_the_row():
    table = sinusoids_2d(3, 5, 16)
    assert table.shape == (15, 16)
    for place in range(15):
        row, column = divmod(place, 5)
        frequencies = [10_000 ** (-k / 4) for k in range(4)]
        expected = [
            function(at * frequency)
            for at in (column, row)
            for function in (math.sin, math.cos)
            for frequency in frequencies
        ]
        torch.testing.assert_close(table[place], torch.tensor(expected))
    with pytest.raises(ValueError, match="multiple of 4, got 10"):
        sinusoids_2d(2, 2, 10)
