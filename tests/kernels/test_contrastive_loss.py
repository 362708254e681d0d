"""The contrastive loss in tiles against the whole matrix, on one rank and over several, and what it holds at most."""

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
def test_losses_and_gradients_do_not_depend_on_tiles(n, e, tile, seed):
    images, captions, weight = pairs(n, e, seed)
    found = with_gradients(contrastive_losses, images, captions, weight, tile=tile)
    wanted = with_gradients(contrastive_losses_reference, images, captions, weight)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_loss_is_the_mean_of_two_cross_entropies():
    images, captions, _ = pairs(6, 4)
    logits, right = images @ captions.T, torch.arange(6)
    of_captions, of_images = (F.cross_entropy(each, right, reduction="none") for each in (logits, logits.T))
    torch.testing.assert_close(contrastive_losses(images, captions), (of_captions + of_images) / 2)


def test_vectors_that_are_all_alike_cost_the_logarithm_of_their_number():
    ones = torch.ones(8, 3)
    torch.testing.assert_close(contrastive_losses(ones, ones), torch.full((8,), math.log(8)))


def test_logits_of_hundreds_stay_finite():
    images, captions, weight = (each.float() for each in pairs(12, 4))
    found = with_gradients(contrastive_losses, 400 * images, captions, weight, tile=5)
    wanted = with_gradients(contrastive_losses_reference, 400 * images.double(), captions.double(), weight.double())
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-4, atol=1e-4)


def test_halves_are_computed_in_float32():
    images, captions, _ = pairs(9, 4)
    halves = contrastive_losses(images.bfloat16().requires_grad_(), captions.bfloat16())
    wanted = contrastive_losses_reference(images.bfloat16().float(), captions.bfloat16().float())
    torch.testing.assert_close(halves.detach(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("function", "holds_all"), [(contrastive_losses, False), (contrastive_losses_reference, True)])
def test_the_matrix_of_all_products_is_never_there(function, holds_all):
    n, e, tile = 512, 8, 64
    images, captions, weight = (each.float() for each in pairs(n, e))
    settings = {} if holds_all else {"tile": tile}
    with Largest() as seen:
        with_gradients(function, images, captions, weight, **settings)
    assert (seen.elements == n * n) if holds_all else (seen.elements == max(tile * tile, n * e))


def test_second_derivatives_are_refused_with_the_way_out():
    images, captions, _ = pairs(4, 3)
    images.requires_grad_()
    with pytest.raises(UsageError, match="second derivative"):
        torch.autograd.grad(contrastive_losses(images, captions).sum(), images, create_graph=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_over_ranks_losses_and_gradients_are_those_of_one_process(ranks):
    images, captions, weight = pairs(PAIRS, 6)
    wanted = with_gradients(contrastive_losses_reference, images, captions, weight)
    told = on_ranks(ranks, over_ranks, 5)
    for index, other in enumerate(wanted):
        found = torch.cat([torch.tensor(rank[index], dtype=torch.float64) for rank in told])
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-12)
    assert max(rank[3] for rank in told) < PAIRS * PAIRS  # elements of the largest tensor of a rank


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_places_are_those_of_a_sorted_list(queries, keys, groups, tile, seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randint(-2, 3, (count, 2), generator=generator).double() for count in (queries, keys)]
    of_keys = torch.randint(groups, (keys,), generator=generator)
    of_queries = of_keys[torch.randint(keys, (queries,), generator=generator)]
    found = places_of_own(*vectors, of_queries, of_keys, tile)
    for query, own, place in zip(vectors[0], of_queries, found, strict=True):
        ordered = sorted(
            (-float(query @ key), int(other == own)) for key, other in zip(vectors[1], of_keys, strict=True)
        )
        assert place == next(index for index, (_, right) in enumerate(ordered) if right)


def test_who_gives_all_the_same_vector_finds_its_own_last():
    numbers = torch.arange(5)
    assert places_of_own(torch.ones(5, 2), torch.ones(5, 2), numbers, numbers).tolist() == [4] * 5
    nothing = torch.full((5, 2), torch.nan)
    assert places_of_own(nothing, nothing, numbers, numbers).tolist() == [4] * 5
