"""Cropped spectra compared with an explicit low-pass filter and sampling."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from thrifty.kernels.image_resizing import resize, scaled_side
from thrifty.kernels.low_pass import crop_spectrum


def sampled_low_pass(full: int, size: int) -> Tensor:
    """Return the weight (size, full) of each old sample in each new one.

    The old samples are those of a periodic signal, of which all frequencies up to size / 2 are kept. At an even size,
    the highest frequency counts half for each sign.
    """
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
def test_crop_spectrum_is_a_sampled_ideal_low_pass(height: int, width: int, to: tuple[int, int]) -> None:
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    rows, columns = sampled_low_pass(height, to[0]), sampled_low_pass(width, to[1])
    if to[1] == width:  # this dim does not change, including its highest frequency
        columns = torch.eye(width, dtype=torch.float64)
    expected = rows @ images.double() @ columns.T
    assert (crop_spectrum(images, *to) - expected).abs().max() < 1e-6


@settings(max_examples=25)
@given(some.integers(2, 12), some.integers(1, 12), some.floats(-3, 3))
def test_gray_area_keeps_its_brightness(side: int, to: int, grey: float) -> None:
    small = crop_spectrum(torch.full((1, side, side), grey), min(to, side), min(to, side))
    torch.testing.assert_close(small, torch.full_like(small, grey))
    torch.testing.assert_close(resize(torch.full((1, side, side), grey), to, to), torch.full((1, to, to), grey))


def test_fine_detail_is_removed_without_aliasing() -> None:
    stripes = torch.cos(2 * math.pi * 6 * torch.arange(16) / 16).expand(1, 16, 16)
    assert crop_spectrum(stripes, 8, 8).abs().max() < 1e-6
    assert stripes[..., ::2].abs().max() == 1.0  # every other pixel alone would show coarse stripes
    assert resize(stripes.contiguous(), 8, 8).abs().max() < 0.5


def test_coarse_wave_keeps_its_amplitude() -> None:
    wave = torch.cos(2 * math.pi * 2 * torch.arange(16) / 16).expand(1, 16, 16)
    expected = torch.cos(2 * math.pi * 2 * torch.arange(8) / 8).expand(1, 8, 8)
    torch.testing.assert_close(crop_spectrum(wave, 8, 8), expected)


def test_images_of_the_requested_size_are_returned_unchanged() -> None:
    images = torch.rand(2, 3, 8, 8)
    assert crop_spectrum(images, 8, 8) is images and resize(images, 8, 8) is images


def test_halving_averages_over_a_tent_of_four_pixels() -> None:
    image = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    tent = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    middle = torch.einsum("i,j,ij->", tent, tent, image[0, 0, 1:5, 3:7])
    torch.testing.assert_close(resize(image, 4, 4)[0, 0, 1, 2], middle)
    assert torch.equal(resize(image[:, 0], 4, 4), resize(image, 4, 4)[:, 0])


@given(some.integers(1, 300), some.floats(0.01, 1), some.sampled_from([1, 4, 16]))
def test_scaled_sides_are_multiples_up_to_the_side(side: int, share: float, multiple: int) -> None:
    actual = scaled_side(side, share, multiple)
    assert 0 < actual <= side
    assert actual % multiple == 0 or actual == side
    assert abs(actual - share * side) <= multiple or actual == side
