"""Augmentation of each image by its key, and every operation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from thrifty.core.errors import UsageError
from thrifty.core.recipe import AugmentationSettings
from thrifty.data.images.augmentation import (
    NARROWEST,
    OPERATIONS,
    AugmentationDraw,
    apply_operations,
    augment,
    brightness,
    contrast,
    crop_and_flip,
    erase_rectangles,
    grey,
    mix_examples,
    partners,
    posterize,
    rotate,
    saturation,
    shear_x,
    solarize,
    stretch,
    uniform,
)
from thrifty.kernels.example_rng import example_keys

EVERYTHING = AugmentationSettings(crop=2, flip=True, operations=3, magnitude=0.7, erase=0.5, mixup=0.4, cutmix=1.0)
FILL = (0.4, 0.5, 0.6)
COLOUR = torch.tensor(FILL).view(1, 3, 1, 1)
ONE = torch.ones(1, 1, 1, 1)


def keys(count: int, seed: int = 0) -> np.ndarray:
    return example_keys(seed, np.arange(count)).view(np.uint64)


def pictures(count: int, side: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20)
@given(seed=st.integers(0, 99), rows=st.lists(st.integers(0, 11), min_size=1, max_size=12))
def test_augmentation_depends_only_on_the_key(seed, rows):
    images, others, all_keys = pictures(12), pictures(12, seed=1), keys(12, seed)
    whole = mix_examples(augment(images, all_keys, EVERYTHING, FILL), others, all_keys, EVERYTHING)
    some = all_keys[rows]
    part = mix_examples(augment(images[rows], some, EVERYTHING, FILL), others[rows], some, EVERYTHING)
    assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))


def test_augmentation_uses_no_generator():
    before = torch.get_rng_state()
    first = augment(pictures(8), keys(8), EVERYTHING, FILL)
    torch.manual_seed(17)
    assert torch.equal(augment(pictures(8), keys(8), EVERYTHING, FILL), first)
    torch.set_rng_state(before)
    assert not torch.equal(augment(pictures(8), keys(8, seed=1), EVERYTHING, FILL), first)


def test_augmentations_are_independent():
    only_flip = crop_and_flip(pictures(32), keys(32), 0, True)
    both = AugmentationSettings(flip=True, erase=1.0)
    after = augment(pictures(32), keys(32), both, FILL)
    same = (after == only_flip) | (after == COLOUR)
    assert same.all() and (after != only_flip).any()


def test_crops_and_flips_equal_a_plain_loop():
    images, chosen = pictures(64), keys(64)
    found = crop_and_flip(images, chosen, 2, True)
    shifts, mirrored = (
        (uniform(chosen, AugmentationDraw.CROP, 2) * 5).long(),
        uniform(chosen, AugmentationDraw.FLIP, 1)[:, 0] < 0.5,
    )
    for image, (down, right), mirror, result in zip(images, shifts.tolist(), mirrored, found, strict=True):
        piece = F.pad(image, (2, 2, 2, 2))[:, down : down + 8, right : right + 8]
        assert torch.equal(result, piece.flip(-1) if mirror else piece)
    assert {0, 4} <= set(shifts.flatten().tolist()) and 16 < int(mirrored.sum()) < 48


def test_size_and_fraction_of_erased_rectangles():
    images = torch.zeros(2000, 1, 32, 32)
    found = erase_rectangles(images, keys(2000), 0.25, torch.ones(1, 1, 1, 1))
    areas = found.mean((1, 2, 3))
    assert float((areas > 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    hit = found[areas > 0, 0]
    assert areas[areas > 0].min() > 0.015 and areas.max() < 0.36
    for picture in hit[:50]:
        rows, columns = picture.any(1), picture.any(0)
        assert torch.equal(picture.bool(), rows[:, None] & columns[None, :])
        assert NARROWEST / 1.6 < float(columns.sum() / rows.sum()) < 1.6 / NARROWEST


def test_mixing_weights_follow_the_beta_distribution():
    images, others = torch.zeros(4000, 1, 4, 4), torch.ones(4000, 1, 4, 4)
    found, own = mix_examples(images, others, keys(4000), AugmentationSettings(mixup=0.4))
    torch.testing.assert_close(found.mean((1, 2, 3)), 1 - own)
    assert stats.kstest(own.numpy(), stats.beta(0.4, 0.4).cdf).pvalue > 0.01


def test_cutmix_weight_is_the_remaining_area():
    images, others = torch.zeros(500, 1, 16, 16), torch.ones(500, 1, 16, 16)
    found, own = mix_examples(images, others, keys(500), AugmentationSettings(cutmix=1.0))
    assert set(found.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(own, 1 - found.mean((1, 2, 3)))
    assert own.min() < 0.2 and own.max() > 0.95
    both, _ = mix_examples(images, others, keys(500), AugmentationSettings(cutmix=1.0, mixup=0.4))
    blended = ((both > 0) & (both < 1)).flatten(1).any(1)
    assert 200 < int(blended.sum()) < 300


def test_partners_are_any_of_all_images():
    chosen, other_keys = partners(keys(3000), 10)
    assert np.bincount(chosen, minlength=10).min() > 200
    assert not (other_keys == keys(3000)).any() and len(np.unique(other_keys)) == 3000


def test_operations_match_their_names():
    images = pictures(3)
    torch.testing.assert_close(brightness(images, -ONE, COLOUR), images * 0.1)
    flat = contrast(images, -ONE / 0.9, COLOUR)
    torch.testing.assert_close(flat, grey(images).mean((2, 3), keepdim=True).expand_as(images), rtol=0, atol=1e-6)
    without_colour = saturation(images, -ONE / 0.9, COLOUR)
    torch.testing.assert_close(without_colour, grey(images).expand_as(images), rtol=0, atol=1e-6)
    stretched = stretch(images * 0.3 + 0.2, ONE, COLOUR)
    assert stretched.amin((2, 3)).abs().max() < 1e-6 and (stretched.amax((2, 3)) - 1).abs().max() < 1e-6
    assert torch.equal(stretch(torch.full((1, 3, 2, 2), 0.5), ONE, COLOUR), torch.full((1, 3, 2, 2), 0.5))
    assert len(posterize(torch.linspace(0, 1, 1024).view(1, 1, 32, 32), ONE, COLOUR).unique()) == 16
    assert torch.equal(solarize(images, ONE, COLOUR), torch.where(images > 0, 1 - images, images))


def test_geometry_rotates_around_the_centre_and_fills():
    bar = torch.zeros(1, 1, 33, 33)
    bar[..., 16, :] = 1.0
    turned = rotate(bar, ONE, torch.zeros(1, 1, 1, 1))
    assert turned[0, 0, 16, 16] == pytest.approx(1.0)
    y, x = turned[0, 0].nonzero().double().unbind(1)
    assert abs(float(stats.linregress(x, y).slope)) == pytest.approx(np.tan(np.pi / 6), rel=0.05)
    corner = shear_x(torch.ones(1, 3, 32, 32), ONE, COLOUR)[0, :, -1, -1]
    torch.testing.assert_close(corner, torch.tensor(FILL))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_strength_zero_is_identity_and_range_is_kept(operation):
    images = pictures(4)
    images[:, :, 0, 0], images[:, :, 7, 7] = 0.0, 1.0
    ones = ONE.expand(4, 1, 1, 1)
    torch.testing.assert_close(operation(images, 0 * ones, COLOUR), images, rtol=0, atol=5e-3)
    for strength in (ones, -ones):
        found = operation(images, strength, COLOUR)
        assert found.shape == images.shape and found.min() > -1e-5 and found.max() < 1 + 1e-5


def test_operations_are_equally_frequent():
    images = torch.full((3000, 1, 1, 1), 0.7)
    found = apply_operations(images, keys(3000), 1, 1.0, torch.zeros(1, 1, 1, 1))
    brighter = (found == 1.0).float().mean()
    assert 1 / (3 * len(OPERATIONS)) < brighter < 1 / len(OPERATIONS)  # half of the images whose brightness changes


def test_settings_out_of_bounds_are_refused():
    with pytest.raises(UsageError, match=r"erase is 1\.5"):
        AugmentationSettings(erase=1.5)
    with pytest.raises(UsageError, match="crop is -1"):
        AugmentationSettings(crop=-1)
    most = apply_operations(pictures(2), keys(2), 32, 0.3, COLOUR)
    assert most.shape == (2, 3, 8, 8)
    with pytest.raises(UsageError, match="operations is 33"):
        AugmentationSettings(operations=33)
