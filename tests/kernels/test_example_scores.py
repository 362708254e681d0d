"""Scores of examples, against plain loops and against what is known of them."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from thrifty.core.errors import UsageError
from thrifty.kernels.example_scores import (
    Fields,
    ForgettingCounter,
    el2n,
    grand,
    input_norms,
    margin,
    prototype_distance,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(2, 9), st.floats(0.01, 50), st.integers(0, 1000))
def test_el2n_is_between_0_and_the_root_of_2_and_is_the_gradient_at_the_logits(
    n: int, classes: int, scale: float, seed: int
) -> None:
    logits = (scale * drawn(n, classes, seed=seed)).requires_grad_(True)
    labels = torch.arange(n) % classes
    found = el2n(logits, labels)
    assert (found >= 0).all() and (found <= math.sqrt(2) + 1e-6).all()
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)
    torch.testing.assert_close(found, gradient.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(el2n(logits, F.one_hot(labels, classes)), found)


def test_el2n_reaches_its_bounds_where_the_model_is_certain() -> None:
    certain = torch.tensor([[100.0, 0.0, 0.0], [100.0, 0.0, 0.0]])
    assert el2n(certain, torch.tensor([0, 1])).tolist() == pytest.approx([0.0, math.sqrt(2)])


def test_the_margin_is_the_lead_of_the_best_other_label() -> None:
    share = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.25, 0.5, 0.25]])
    found = margin(share.log(), torch.tensor([0, 1, 1]))
    assert found.tolist() == pytest.approx([-0.5, 0.3, -0.25])


def test_the_norm_of_an_input_is_that_of_all_its_values() -> None:
    assert input_norms(torch.tensor([[[3.0], [4.0]], [[0.0], [0.0]]])).tolist() == [5.0, 0.0]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))


def loss_of_one(model: nn.Module, parameters: Fields, example: Fields) -> Tensor:
    logits = functional_call(model, dict(parameters), (example["inputs"][None],))
    return F.cross_entropy(logits, example["labels"][None])


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_grand_is_the_norm_of_single_backward_passes_whatever_the_chunks(chunk: int | None) -> None:
    model, n = network(), 11
    examples = {"inputs": drawn(n, 5), "labels": torch.arange(n) % 3}
    wanted = []
    for row in range(n):
        model.zero_grad()
        F.cross_entropy(model(examples["inputs"][row : row + 1]), examples["labels"][row : row + 1]).backward()
        wanted.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))
    found = grand(lambda p, e: loss_of_one(model, p, e), dict(model.named_parameters()), examples, chunk)
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
    assert not found.requires_grad


def test_grand_leaves_the_gradients_of_the_model_alone() -> None:
    model = network()
    examples = {"inputs": drawn(3, 5), "labels": torch.zeros(3, dtype=torch.int64)}
    grand(lambda p, e: loss_of_one(model, p, e), dict(model.named_parameters()), examples)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_forgetting_counts_falls_from_right_to_wrong() -> None:
    counter = ForgettingCounter(4)
    everything = torch.arange(4)
    for right in ([1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1], [0, 1, 0, 1]):
        counter.update(everything, torch.tensor(right))
    assert counter.scores().tolist() == [2, 0, 4, 0]  # the third was never known: forgotten at each of 4 looks


def test_forgetting_looks_at_some_examples_at_a_time() -> None:
    counter = ForgettingCounter(3)
    counter.update(torch.tensor([2, 0]), torch.tensor([True, True]))
    counter.update(torch.tensor([2]), torch.tensor([False]))
    assert counter.scores().tolist() == [0, 0, 1]
    assert counter.looks.tolist() == [1, 0, 2]


def test_the_distance_to_the_own_prototype_is_that_to_the_mean_direction_of_the_own_group() -> None:
    directions = F.normalize(torch.tensor([[1.0, 0.1, 0.0], [0.0, 1.0, 0.1]]), dim=1)
    groups = torch.arange(40) % 2
    points = (directions[groups] + 0.05 * drawn(40, 3)) * (1 + drawn(40, 1).abs())  # lengths must not matter
    found = prototype_distance(points, 2, seed=0)
    unit = F.normalize(points, dim=1)
    for group in (0, 1):
        own = unit[groups == group]
        centre = F.normalize(own.mean(0), dim=0)
        torch.testing.assert_close(found[groups == group], 1 - own @ centre, rtol=1e-4, atol=1e-5)


def test_prototypes_are_the_same_for_the_same_seed() -> None:
    points = drawn(60, 4)
    assert torch.equal(prototype_distance(points, 7, seed=3), prototype_distance(points, 7, seed=3))


def test_more_clusters_than_examples_are_refused() -> None:
    with pytest.raises(UsageError, match="3 examples cannot make 4 clusters"):
        prototype_distance(drawn(3, 2), 4, seed=0)


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(UsageError, match=r"thrifty\[pruning\]"):
        prototype_distance(drawn(3, 2), 2, seed=0)
