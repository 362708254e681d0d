"""The middle of a spectrum against a low-pass and a sampling that are written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from thrifty.kernels.image_resizing import resize, scaled_side
from thrifty.kernels.low_pass import crop_spectrum


def sampled_low_pass(full: int, size: int) -> Tensor:
    """(size, full): what each new sample takes of each old one, if the old ones are those of a periodic signal of which
    all frequencies up to size / 2 are kept; of the last one, at an even size, a half each of both signs."""
    rows = []
    for new in range(size):
        row = []
        for old in range(full):
            total = 0.0
            for frequency in range(-(size // 2), size // 2 + 1):
                edge = 0.5 if size % 2 == 0 and abs(frequency) == size // 2 else 1.0
                total += edge * math.cos(2 * math.pi * frequency * (new / size - old / full))
            row.append(total / full)
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("height", "width", "to"), [(16, 16, (8, 8)), (12, 15, (6, 9)), (9, 14, (5, 14)), (8, 8, (7, 2))]
)
def test_it_is_an_ideal_low_pass_sampled_at_the_new_pixels(height: int, width: int, to: tuple[int, int]) -> None:
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    rows, columns = sampled_low_pass(height, to[0]), sampled_low_pass(width, to[1])
    if to[1] == width:  # that dim is left alone, its highest frequency too
        columns = torch.eye(width, dtype=torch.float64)
    expected = rows @ images.double() @ columns.T
    assert (crop_spectrum(images, *to) - expected).abs().max() < 1e-6


@settings(max_examples=25)
@given(some.integers(2, 12), some.integers(1, 12), some.floats(-3, 3))
def test_a_grey_area_keeps_its_brightness(side: int, to: int, grey: float) -> None:
    small = crop_spectrum(torch.full((1, side, side), grey), min(to, side), min(to, side))
    torch.testing.assert_close(small, torch.full_like(small, grey))
    torch.testing.assert_close(resize(torch.full((1, side, side), grey), to, to), torch.full((1, to, to), grey))


def test_what_is_finer_than_the_new_pixels_is_gone_and_not_folded_back() -> None:
    stripes = torch.cos(2 * math.pi * 6 * torch.arange(16) / 16).expand(1, 16, 16)
    assert crop_spectrum(stripes, 8, 8).abs().max() < 1e-6
    assert stripes[..., ::2].abs().max() == 1.0  # taking every other pixel makes coarse stripes of them
    assert resize(stripes.contiguous(), 8, 8).abs().max() < 0.5


def test_what_is_coarser_keeps_its_height() -> None:
    wave = torch.cos(2 * math.pi * 2 * torch.arange(16) / 16).expand(1, 16, 16)
    expected = torch.cos(2 * math.pi * 2 * torch.arange(8) / 8).expand(1, 8, 8)
    torch.testing.assert_close(crop_spectrum(wave, 8, 8), expected)


def test_images_of_the_size_asked_for_are_handed_on() -> None:
    images = torch.rand(2, 3, 8, 8)
    assert crop_spectrum(images, 8, 8) is images and resize(images, 8, 8) is images


def test_half_the_side_is_the_mean_over_a_tent_of_four_pixels() -> None:
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    tent = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    middle = torch.einsum("i,j,ij->", tent, tent, image[0, 0, 1:5, 3:7])
    torch.testing.assert_close(resize(image, 4, 4)[0, 0, 1, 2], middle)
    assert torch.equal(resize(image[:, 0], 4, 4), resize(image, 4, 4)[:, 0])


@given(some.integers(1, 300), some.floats(0.01, 1), some.sampled_from([1, 4, 16]))
def test_sides_are_multiples_within_what_there_is(side: int, share: float, multiple: int) -> None:
    found = scaled_side(side, share, multiple)
    assert 0 < found <= side
    assert found % multiple == 0 or found == side
    assert abs(found - share * side) <= multiple or found == side
