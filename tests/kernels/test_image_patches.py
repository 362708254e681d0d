"""Images as patches: plain loops say what each function gives."""

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
def test_cutting_and_putting_together_is_the_identity(b: int, c: int, patch: int, rows: int, columns: int, seed: int):
    pictures = torch.rand(b, c, rows * patch, columns * patch, generator=torch.Generator().manual_seed(seed))
    pixels = patchify(pictures, patch)
    assert pixels.shape == (b, rows * columns, patch * patch * c)
    assert torch.equal(unpatchify(pixels, patch, rows * patch, columns * patch), pictures)


def test_patches_go_row_by_row_and_so_do_their_pixels_channels_innermost():
    pixels = patchify(PICTURES, 4)
    for place in range(6):
        row, column = divmod(place, 3)
        for y in range(4):
            for x in range(4):
                wanted = PICTURES[:, :, 4 * row + y, 4 * column + x]
                assert torch.equal(pixels[:, place, 3 * (4 * y + x) : 3 * (4 * y + x) + 3], wanted)


def test_a_patch_is_standardised_by_its_own_unbiased_variance():
    pixels = patchify(PICTURES, 4)
    found, values = standardize_patches(pixels), pixels.double().numpy()
    wanted = (values - values.mean(-1, keepdims=True)) / np.sqrt(values.var(-1, ddof=1, keepdims=True) + 1e-6)
    torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)
    assert not standardize_patches(torch.full((1, 1, 12), 0.3)).abs().max() > 1e-3  # an even patch has no deviation


def test_standardised_patches_get_their_brightness_back():
    pixels = 3 * patchify(PICTURES, 4) + 2
    torch.testing.assert_close(match_brightness(standardize_patches(pixels), pixels), pixels)
    flat = match_brightness(torch.zeros_like(pixels), pixels)
    torch.testing.assert_close(flat, pixels.mean(-1, keepdim=True).expand_as(pixels))


@given(st.integers(1, 3), st.integers(2, 12), st.integers(0, 99), st.data())
def test_what_is_taken_away_and_put_back_stands_where_it_stood(b: int, total: int, seed: int, data: st.DataObject):
    count = data.draw(st.integers(1, total))
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(b, total, 5, generator=generator)
    places = torch.rand(b, total, generator=generator).argsort(1)[:, :count]  # in any order
    absent = torch.randn(1, 1, 5, generator=generator)
    found = scatter_tokens(gather_tokens(tokens, places), places, absent, total)
    for row in range(b):
        seen = set(places[row].tolist())
        for place in range(total):
            assert torch.equal(found[row, place], tokens[row, place] if place in seen else absent[0, 0])


def test_gradients_of_what_is_absent_are_summed_over_its_places():
    absent = torch.zeros(1, 1, 2, requires_grad=True)
    scatter_tokens(torch.ones(3, 4, 2), torch.arange(4).expand(3, -1), absent, 10).sum().backward()
    assert absent.grad is not None and absent.grad.tolist() == [[[18.0, 18.0]]]  # 3 rows of 6


def test_blanks_are_zero_and_visible_patches_stay():
    visible = torch.tensor([[0, 5], [2, 3]])
    pixels, found = patchify(PICTURES, 4), patchify(blank_patches(PICTURES, visible, 4), 4)
    for row in range(2):
        for place in range(6):
            wanted = pixels[row, place] if place in visible[row] else torch.zeros(48)
            assert torch.equal(found[row, place], wanted)


def test_positions_are_sines_and_cosines_of_the_column_and_then_of_the_row():
    table = sinusoids_2d(3, 5, 16)
    assert table.shape == (15, 16)
    for place in range(15):
        row, column = divmod(place, 5)
        frequencies = [10_000 ** (-k / 4) for k in range(4)]
        wanted = [
            function(at * frequency)
            for at in (column, row)
            for function in (math.sin, math.cos)
            for frequency in frequencies
        ]
        torch.testing.assert_close(table[place], torch.tensor(wanted))
    with pytest.raises(ValueError, match="four equal parts"):
        sinusoids_2d(2, 2, 10)
