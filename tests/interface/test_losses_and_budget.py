"""`thrifty.losses` and `thrifty.activation_budget` in a loop of the user's own."""

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import VOCABULARY, tiny_model
from torch import Tensor, nn

import thrifty
from thrifty.core.errors import InfeasibleError, UsageError
from thrifty.core.tensor_tracing import StepTrace


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_chunked_cross_entropy_and_gradients_equal_torch(reduction: str, z_loss: float, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    hidden, weight, bias = draw(3, 7, 16), draw(50, 16), draw(50) if has_bias else None
    labels = torch.randint(50, (3, 7), generator=generator)
    labels[0, :4] = -100
    inputs = [each for each in (hidden, weight, bias) if each is not None]

    logits = F.linear(hidden, weight, bias)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, 7)
    expected = expected + z_loss * torch.where(labels != -100, logits.logsumexp(-1).square(), 0.0)
    factor = {"mean": 1 / (labels != -100).sum(), "sum": 1.0, "none": 1.0}[reduction]
    loss = thrifty.losses.chunked_cross_entropy(hidden, weight, labels, bias=bias, reduction=reduction, z_loss=z_loss)
    torch.testing.assert_close(loss, expected if reduction == "none" else expected.sum() * factor, check_dtype=False)
    gradients = torch.autograd.grad(loss.sum(), inputs)
    torch.testing.assert_close(gradients, torch.autograd.grad((expected * factor).sum(), inputs), check_dtype=False)


def test_chunked_cross_entropy_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="do not fit"):
        thrifty.losses.chunked_cross_entropy(torch.ones(2, 3, 4), torch.ones(5, 4), torch.ones(2, 4, dtype=torch.long))


def loss_and_peak(model: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    with StepTrace(*model.parameters(), tokens) as live:
        loss = model(tokens).float().square().mean()
        peak = live.now
        loss.backward()
    return loss, peak


def test_activation_budget_saves_memory_and_keeps_gradients() -> None:
    tokens = torch.randint(VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(0))
    plain, budgeted = tiny_model(style="gpt"), tiny_model(style="gpt")
    loss, whole = loss_and_peak(plain, tokens)
    with thrifty.activation_budget(budgeted, "50%"):
        budgeted(tokens).sum().backward()  # the first pass for these shapes learns what a plan needs
    budgeted.zero_grad()
    with thrifty.activation_budget(budgeted, "50%"):
        again, less = loss_and_peak(budgeted, tokens)
    assert torch.equal(loss, again) and less < 0.75 * whole
    for one, other in zip(plain.parameters(), budgeted.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    budgeted.zero_grad()
    assert loss_and_peak(budgeted, tokens)[1] == pytest.approx(whole)  # outside all are kept


@pytest.mark.parametrize("budget", ["half", "1 kB", "x%"])
def test_a_budget_that_is_none_or_cannot_be_met_is_refused(budget: str) -> None:
    model = tiny_model(style="gpt")
    with pytest.raises((UsageError, InfeasibleError)), thrifty.activation_budget(model, budget):
        model(torch.zeros(8, 16, dtype=torch.long))
    model(torch.zeros(8, 16, dtype=torch.long)).sum().backward()
