"""Tensors that an activation store receives in a forward pass, and that the backward pass receives from it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thrifty.memory.saved_tensor_hooks import is_parameter, use_activation_store
from thrifty.models.families import assemble
from thrifty.models.model_config import ModelConfig
from thrifty.models.transformer import initialize


class Copying:
    """A store that keeps a copy of every tensor in other memory, and counts."""

    def __init__(self) -> None:
        self.kept: list[tuple[torch.Size, torch.dtype]] = []
        self.restored = 0

    def store(self, activation: Tensor) -> Callable[[], Tensor]:
        self.kept.append((activation.shape, activation.dtype))
        copy = activation.clone(memory_format=torch.contiguous_format)

        def restore() -> Tensor:
            self.restored += 1
            return copy.clone()

        return restore


class Refusing:
    def store(self, activation: Tensor) -> None:
        return None


def model_of(style: str) -> nn.Module:
    model = assemble(ModelConfig(style, 2, 32, 4, 2 if style == "llama" else 4, 64, 256, 16, True))  # type: ignore[arg-type]
    initialize(model, 0, std=0.1)
    return model


def gradients(model: nn.Module, keeper: object | None, autocast: bool) -> list[Tensor]:
    model.zero_grad()
    tokens = torch.arange(64).view(4, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if keeper is None:
            hidden = model(tokens)
        else:
            with use_activation_store(keeper, smallest=1):  # type: ignore[arg-type]
                hidden = model(tokens)
        loss = model.head(hidden).float().square().mean()
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("keeper", [Copying, Refusing])
def test_gradients_through_a_store_are_bit_identical(style: str, autocast: bool, keeper: type) -> None:
    model = model_of(style)
    plain = gradients(model, None, autocast)
    for mine, theirs in zip(gradients(model, keeper(), autocast), plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("autocast", [False, True])
def test_no_parameter_reaches_a_store(autocast: bool) -> None:
    model, keeper = model_of("gpt"), Copying()
    gradients(model, keeper, autocast)
    shapes = {parameter.shape for parameter in model.parameters()}
    shapes |= {parameter.t().shape for parameter in model.parameters() if parameter.ndim == 2}
    assert keeper.kept and not [shape for shape, dtype in keeper.kept if dtype.is_floating_point and shape in shapes]


def test_shared_storage_is_stored_and_restored_once() -> None:
    keeper = Copying()
    x = torch.randn(2, 8, 3 * 16, requires_grad=True)
    fused = x * 2
    with use_activation_store(keeper, smallest=1):
        q, k, v = (part.view(2, 8, 2, 8).transpose(1, 2) for part in fused.split(16, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert [shape for shape, _ in keeper.kept].count(fused.shape) == 1
    out.sum().backward()
    assert keeper.restored == len(keeper.kept)


def test_value_changed_in_place_is_a_new_value() -> None:
    keeper = Copying()
    x = torch.randn(64, requires_grad=True)
    with use_activation_store(keeper, smallest=1):
        doubled = x * 2
        first = doubled.exp()
        second = first.detach().clone().requires_grad_()
        a = second.square()
    a.sum().backward()
    assert torch.equal(second.grad, 2 * first.detach())


def test_memory_order_is_restored() -> None:
    keeper = Copying()
    x = torch.randn(8, 6, requires_grad=True)
    with use_activation_store(keeper, smallest=1):
        product = (x.t() * 1.0).exp()
    assert not product.is_contiguous()
    product.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_small_tensors_are_not_stored() -> None:
    keeper = Copying()
    x = torch.randn(100, requires_grad=True)
    with use_activation_store(keeper, smallest=101):
        x.exp().sum().backward()
    assert keeper.kept == []


def test_is_parameter_in_every_shape_and_dtype() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    for each in (weight, weight.t(), weight.bfloat16(), weight.bfloat16().t(), weight[1:], frozen, frozen.t()):
        assert is_parameter(each)
    assert not is_parameter(weight * 2) and not is_parameter(torch.randn(4)) and not is_parameter((weight @ weight).t())
