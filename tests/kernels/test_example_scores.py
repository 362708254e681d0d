"""Scores of examples compared with plain loops and known properties."""

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


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(2, 9), st.floats(0.01, 50), st.integers(0, 1000))
def test_el2n_is_bounded_and_equals_gradient_norm_at_logits(n: int, classes: int, scale: float, seed: int) -> None:
    logits = (scale * normal(n, classes, seed=seed)).requires_grad_(True)
    labels = torch.arange(n) % classes
    actual = el2n(logits, labels)
    assert (actual >= 0).all() and (actual <= math.sqrt(2) + 1e-6).all()
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)
    torch.testing.assert_close(actual, gradient.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(el2n(logits, F.one_hot(labels, classes)), actual)


def test_el2n_reaches_its_bounds_for_certain_predictions() -> None:
    certain = torch.tensor([[100.0, 0.0, 0.0], [100.0, 0.0, 0.0]])
    assert el2n(certain, torch.tensor([0, 1])).tolist() == pytest.approx([0.0, math.sqrt(2)])


def test_margin_is_lead_of_the_best_wrong_label() -> None:
    probability = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.25, 0.5, 0.25]])
    actual = margin(probability.log(), torch.tensor([0, 1, 1]))
    assert actual.tolist() == pytest.approx([-0.5, 0.3, -0.25])


def test_input_norm_covers_all_elements() -> None:
    assert input_norms(torch.tensor([[[3.0], [4.0]], [[0.0], [0.0]]])).tolist() == [5.0, 0.0]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))


def loss_of_one(model: nn.Module, parameters: Fields, example: Fields) -> Tensor:
    logits = functional_call(model, dict(parameters), (example["inputs"][None],))
    return F.cross_entropy(logits, example["labels"][None])


@pytest.mark.parametrize("chunk", [1, 4, None])
def test_grand_equals_single_backward_passes_for_any_chunk(chunk: int | None) -> None:
    model, n = network(), 11
    examples = {"inputs": normal(n, 5), "labels": torch.arange(n) % 3}
    expected = []
    for row in range(n):
        model.zero_grad()
        F.cross_entropy(model(examples["inputs"][row : row + 1]), examples["labels"][row : row + 1]).backward()
        expected.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))
    actual = grand(lambda p, e: loss_of_one(model, p, e), dict(model.named_parameters()), examples, chunk)
    assert actual.tolist() == pytest.approx(expected, rel=1e-5)
    assert not actual.requires_grad


def test_grand_does_not_change_model_gradients() -> None:
    model = network()
    examples = {"inputs": normal(3, 5), "labels": torch.zeros(3, dtype=torch.int64)}
    grand(lambda p, e: loss_of_one(model, p, e), dict(model.named_parameters()), examples)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_forgetting_counts_changes_from_right_to_wrong() -> None:
    counter = ForgettingCounter(4)
    everything = torch.arange(4)
    for right in ([1, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1], [0, 1, 0, 1]):
        counter.update(everything, torch.tensor(right))
    assert counter.scores().tolist() == [2, 0, 4, 0]  # the third was never right: forgotten at each of 4 checks


def test_forgetting_updates_some_examples_at_a_time() -> None:
    counter = ForgettingCounter(3)
    counter.update(torch.tensor([2, 0]), torch.tensor([True, True]))
    counter.update(torch.tensor([2]), torch.tensor([False]))
    assert counter.scores().tolist() == [0, 0, 1]
    assert counter.checks.tolist() == [1, 0, 2]


def test_prototype_is_mean_direction_of_the_cluster() -> None:
    directions = F.normalize(torch.tensor([[1.0, 0.1, 0.0], [0.0, 1.0, 0.1]]), dim=1)
    groups = torch.arange(40) % 2
    points = (directions[groups] + 0.05 * normal(40, 3)) * (1 + normal(40, 1).abs())  # lengths must not matter
    actual = prototype_distance(points, 2, seed=0)
    unit = F.normalize(points, dim=1)
    for group in (0, 1):
        own = unit[groups == group]
        centre = F.normalize(own.mean(0), dim=0)
        torch.testing.assert_close(actual[groups == group], 1 - own @ centre, rtol=1e-4, atol=1e-5)


def test_prototypes_are_reproducible_by_seed() -> None:
    points = normal(60, 4)
    assert torch.equal(prototype_distance(points, 7, seed=3), prototype_distance(points, 7, seed=3))


def test_more_clusters_than_examples_are_refused() -> None:
    with pytest.raises(UsageError, match="3 examples cannot form 4 clusters"):
        prototype_distance(normal(3, 2), 4, seed=0)


def test_missing_scikit_learn_is_reported_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(UsageError, match=r"thrifty\[pruning\]"):
        prototype_distance(normal(3, 2), 2, seed=0)
