"""A loss that depends on trained parameters outside its model is refused before the first step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import thrifty
from thrifty.core.errors import UsageError

BATCH = {"x": torch.randn(6, 4), "y": torch.tensor([0, 1, 2, 0, 1, 2])}


class Criterion(nn.Module):
    """Linear classifier with its loss (b,)."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(4, 3)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classes(hidden), labels, reduction="none")


class Unregistered(nn.Module):
    """Model whose layers are in a list, where torch does not find them."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.first, self.rest, self.reads_values = nn.Linear(4, 4), [nn.Linear(4, 4)], reads_values

    def forward(self, x: Tensor) -> Tensor:
        x = self.rest[0](self.first(x))
        return x * x.sum().item() if self.reads_values else x


def network() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 4))


class WithCriterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.criterion = network(), Criterion()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def losses_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def with_criterion(criterion: nn.Module) -> Callable[..., Tensor]:
    return lambda model, batch: criterion(model(batch["x"]), batch["y"])


def with_other_model(model: nn.Module) -> Callable[..., Tensor]:
    return lambda _, batch: losses_of(model, batch)


def with_temperature(scale: Tensor) -> thrifty.EmbeddingLoss:
    def compare(pairs: Tensor) -> Tensor:
        return F.cross_entropy(scale.exp() * pairs[:, 0] @ pairs[:, 1].T, torch.arange(len(pairs)))

    return thrifty.EmbeddingLoss(lambda model, batch: model(batch["x"]).view(-1, 2, 2), compare)


def trained(model: Any, loss: Any, runs: Path) -> thrifty.RunResult:
    rows = [dict(zip(BATCH, row, strict=True)) for row in zip(*BATCH.values(), strict=True)]
    return thrifty.train(model, rows, held_out=rows, loss=loss, batch=6, budget=1, runs=runs, quiet=True)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (network(), with_criterion(Criterion())),
        (network(), with_other_model(network())),
        (network(), with_temperature(nn.Parameter(torch.zeros(())))),
        (Unregistered(), losses_of),
        (Unregistered(reads_values=True), losses_of),
    ],
    ids=["criterion", "another model", "temperature", "layers in a list", "of a model that reads values"],
)
def test_untrained_parameters_of_a_loss_are_refused(model: nn.Module, loss: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="parameters that its model does not contain") as error:
        trained(model, loss, tmp_path)
    joined = "nn.ModuleDict" if isinstance(model, nn.Sequential) else "model.criterion = criterion"
    assert joined in str(error.value)


def in_model(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model.criterion(model(batch["x"]), batch["y"])


def in_module_dict(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model["criterion"](model["model"](batch["x"]), batch["y"])


def distilled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - TEACHER(batch["x"])).square().mean(1)


def smoothed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Losses with the penalty of the gradient of the inputs."""
    x = batch["x"].detach().requires_grad_()
    losses = F.cross_entropy(model(x), batch["y"], reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + gradient.square().sum(1)


def attacked(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Losses at disturbed inputs (Goodfellow et al. 2015), where the disturbance is a parameter of its own."""
    disturbance = nn.Parameter(torch.zeros_like(batch["x"]))
    losses = F.cross_entropy(model(batch["x"] + disturbance), batch["y"], reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), disturbance, retain_graph=True)
    return losses + losses_of(model, {**batch, "x": batch["x"] + gradient.sign()})


class Tied(nn.Module):
    """Model that keeps one of its parameters in a list too, and reads a value where it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = [self.body.weight]
        self.rate = torch.linspace(0, 1, 3)[1].item()

    def forward(self, x: Tensor) -> Tensor:
        return self.rate * self.body(x).relu() @ self.head[0]


TEACHER = network().requires_grad_(False)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        (WithCriterion(), in_model),
        (nn.ModuleDict({"model": network(), "criterion": Criterion()}), in_module_dict),
        (network(), distilled),
        (network(), smoothed),
        (network(), attacked),
        (Tied, losses_of),
    ],
    ids=["in the model", "in a ModuleDict", "frozen", "an input", "a parameter of one call", "a tied one"],
)
def test_trained_and_frozen_parameters_of_a_loss_are_accepted(model: Any, loss: Any, tmp_path: Path) -> None:
    assert trained(model, loss, tmp_path).summary["steps"] == 1


def test_an_estimate_may_have_an_optimizer_of_the_loss() -> None:
    model, criterion = network(), Criterion()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()])
    assert thrifty.estimate(model, BATCH, loss=with_criterion(criterion), optimizer=optimizer).peak > 0
