"""Compilation reaches torch's own layers and models without blocks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thrifty.modeling.module_surgery import find_stacks, wrap_forward
from thrifty.modeling.patch_grid import accept_other_sizes
from thrifty.techniques.compile import CompiledBlocks

GRAPHS: list[int] = []


@torch._dynamo.register_backend  # type: ignore[arg-type]
def kept(graph: Any, examples: Any) -> Any:
    """A backend that keeps the graph as it is."""
    GRAPHS.append(1)
    return graph.forward


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).relu()


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    pass


def layer(kind: type[nn.TransformerEncoderLayer] = nn.TransformerEncoderLayer) -> nn.TransformerEncoderLayer:
    return kind(8, 2, 16, dropout=0.0, batch_first=True)


MODELS = {
    "torch's encoder": lambda: nn.TransformerEncoder(layer(), 4),
    "layers derived from torch's": lambda: nn.Sequential(*[layer(OwnEncoderLayer) for _ in range(3)]),
    "blocks": lambda: nn.Sequential(*[Residual() for _ in range(3)]),
    "no blocks, of torch": lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
    "no blocks": Residual,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_compiled_and_compute_the_same(name: str) -> None:
    torch._dynamo.reset()
    model, x = MODELS[name](), torch.randn(2, 3, 8)
    plain = copy.deepcopy(model)
    GRAPHS.clear()
    compiled = CompiledBlocks(backend="kept").model(model)
    for _ in range(2):
        assert torch.equal(compiled(x), plain(x))
    compiled(x).sum().backward()
    assert 1 <= len(GRAPHS) <= 2  # the first block may have an input without gradient
    assert all(parameter.grad is not None for parameter in compiled.parameters())
    assert torch.equal(copy.deepcopy(compiled)(x), plain(x))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image_size, self.cut = 8, nn.Conv2d(3, 8, 4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.cut(images).relu().mean((2, 3))


def test_only_the_model_is_traced_for_other_image_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    traced: list[bool] = []

    def found(model: nn.Module) -> dict[str, nn.ModuleList]:
        traced.append(torch.compiler.is_compiling())
        return find_stacks(model)

    monkeypatch.setattr("thrifty.modeling.patch_grid.find_stacks", found)
    model = Pooled()
    plain = copy.deepcopy(model)
    accept_other_sizes(model, "curriculum.resolution")
    compiled = CompiledBlocks(backend="kept").model(model)
    GRAPHS.clear()
    for side in (8, 16, 8):
        images = torch.randn(2, 3, side, side)
        assert torch.equal(compiled(images), plain(images))
    assert len(GRAPHS) == 2
    assert traced and not any(traced)


def test_each_model_is_compiled_however_many_were_before() -> None:
    """torch compiles code at most eight times."""
    torch._dynamo.reset()
    for depth in range(12):
        model = nn.Sequential(*[nn.Linear(4, 4), nn.ReLU()] * (depth + 1))
        CompiledBlocks(backend="aot_eager").model(model)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model(torch.randn(3, 4))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


def test_hooks_and_wrappers_of_compiled_layers_are_called() -> None:
    torch._dynamo.reset()
    model, x, seen = MODELS["torch's encoder"](), torch.randn(2, 3, 8), []
    model = CompiledBlocks(backend="kept").model(model)
    model(x)
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    model(x)
    assert seen == [1] and "forward" not in vars(model.layers[0])
    wrap_forward(model.layers[1], lambda layer, inner, *args, **kwargs: seen.append(2) or inner(*args, **kwargs))
    for _ in range(2):
        model(x)
    assert seen == [1, 1, 2, 1, 2]
