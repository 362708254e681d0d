"""Contrastive loss in tiles compared with the whole matrix, on one rank and several, and its largest tensor."""

import math

import pytest
import torch
import torch.nn.functional as F
from contrastive_work import PAIRS, Largest, over_ranks, pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_processes import on_ranks
from torch import Tensor

from thrifty.core.errors import UsageError
from thrifty.kernels.contrastive_loss import contrastive_losses, contrastive_losses_reference, places_of_own


def with_gradients(function, images: Tensor, captions: Tensor, weight: Tensor, **settings) -> tuple[Tensor, ...]:
    vectors = [images.clone().requires_grad_(), captions.clone().requires_grad_()]
    losses = function(*vectors, **settings)
    return losses.detach(), *torch.autograd.grad((losses * weight).sum(), vectors)


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 50), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_losses_and_gradients_are_independent_of_tile_size(n, e, tile, seed):
    images, captions, weight = pairs(n, e, seed)
    actual = with_gradients(contrastive_losses, images, captions, weight, tile=tile)
    expected = with_gradients(contrastive_losses_reference, images, captions, weight)
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_loss_is_mean_of_two_cross_entropies():
    images, captions, _ = pairs(6, 4)
    logits, labels = images @ captions.T, torch.arange(6)
    caption_losses, image_losses = (F.cross_entropy(each, labels, reduction="none") for each in (logits, logits.T))
    torch.testing.assert_close(contrastive_losses(images, captions), (caption_losses + image_losses) / 2)


def test_identical_vectors_have_loss_log_n():
    ones = torch.ones(8, 3)
    torch.testing.assert_close(contrastive_losses(ones, ones), torch.full((8,), math.log(8)))


def test_large_logits_stay_finite():
    images, captions, weight = (each.float() for each in pairs(12, 4))
    actual = with_gradients(contrastive_losses, 400 * images, captions, weight, tile=5)
    expected = with_gradients(contrastive_losses_reference, 400 * images.double(), captions.double(), weight.double())
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-4, atol=1e-4)


def test_half_precision_is_computed_in_float32():
    images, captions, _ = pairs(9, 4)
    halves = contrastive_losses(images.bfloat16().requires_grad_(), captions.bfloat16())
    expected = contrastive_losses_reference(images.bfloat16().float(), captions.bfloat16().float())
    torch.testing.assert_close(halves.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("function", "holds_all"), [(contrastive_losses, False), (contrastive_losses_reference, True)])
def test_full_matrix_of_products_never_exists(function, holds_all):
    n, e, tile = 512, 8, 64
    images, captions, weight = (each.float() for each in pairs(n, e))
    settings = {} if holds_all else {"tile": tile}
    with Largest() as seen:
        with_gradients(function, images, captions, weight, **settings)
    assert (seen.elements == n * n) if holds_all else (seen.elements == max(tile * tile, n * e))


def test_second_derivative_is_refused():
    images, captions, _ = pairs(4, 3)
    images.requires_grad_()
    with pytest.raises(UsageError, match="second derivative"):
        torch.autograd.grad(contrastive_losses(images, captions).sum(), images, create_graph=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradients_over_ranks_equal_one_process(ranks):
    images, captions, weight = pairs(PAIRS, 6)
    expected = with_gradients(contrastive_losses_reference, images, captions, weight)
    results = on_ranks(ranks, over_ranks, 5)
    for index, other in enumerate(expected):
        actual = torch.cat([torch.tensor(rank[index], dtype=torch.float64) for rank in results])
        torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)
    assert max(rank[3] for rank in results) < PAIRS * PAIRS  # elements of the largest tensor of a rank


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_ranks_of_own_keys_equal_sorted_list(queries, keys, groups, tile, seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randint(-2, 3, (count, 2), generator=generator).double() for count in (queries, keys)]
    key_ids = torch.randint(groups, (keys,), generator=generator)
    query_ids = key_ids[torch.randint(keys, (queries,), generator=generator)]
    actual = places_of_own(*vectors, query_ids, key_ids, tile)
    for query, own, place in zip(vectors[0], query_ids, actual, strict=True):
        ordered = sorted(
            (-float(query @ key), int(other == own)) for key, other in zip(vectors[1], key_ids, strict=True)
        )
        assert place == next(index for index, (_, right) in enumerate(ordered) if right)


def test_identical_vectors_rank_the_own_key_last():
    numbers = torch.arange(5)
    assert places_of_own(torch.ones(5, 2), torch.ones(5, 2), numbers, numbers).tolist() == [4] * 5
    nothing = torch.full((5, 2), torch.nan)
    assert places_of_own(nothing, nothing, numbers, numbers).tolist() == [4] * 5
