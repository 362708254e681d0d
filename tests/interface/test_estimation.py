"""`thrifty.estimate` on modules that the toolkit has never seen, against what the allocator gives out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thrifty
from thrifty.composition.compose import BaseRun, compose
from thrifty.core.errors import UsageError
from thrifty.interface.estimation import OneBatch
from thrifty.objectives.user_loss import UserLoss
from thrifty.techniques.optimizers.adamw import AdamW

TOKENS = torch.randint(200, (8, 32), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
    return nn.Sequential(
        nn.Embedding(200, 64), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(64, 200)
    )


def convolutions() -> nn.Module:
    blocks = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.GELU()]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def recurrent() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.memory = nn.Embedding(200, 48), nn.GRU(48, 48, batch_first=True)
            self.out = nn.Linear(48, 200, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.memory(self.embedding(tokens))[0])

    return Model()


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def image_loss(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).square().mean(1)


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[..., Tensor]]] = {
    "encoder": (encoder, TOKENS, token_loss),
    "convolutions": (convolutions, IMAGES, image_loss),
    "recurrent": (recurrent, TOKENS, token_loss),
}


UNSEEN = {"convolutions": 0.5}
"""Largest share of the peak that kernels may take for themselves: columns of a convolution, which depend on the
processor."""


def measured(build: Callable[[], nn.Module], batch: Tensor, loss: Callable[..., Tensor]) -> float:
    from benchmarks.allocator_trace import measure_allocations

    objective = UserLoss(loss, lambda rows: rows["0"])
    run = compose(BaseRun(build, OneBatch([batch]), objective), [AdamW()], 3)
    return measure_allocations(run).peak


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_is_close_to_what_the_allocator_gives_out(name: str) -> None:
    build, batch, loss = CASES[name]
    torch.manual_seed(0)
    found = thrifty.estimate(build, batch, loss=loss)
    assert found.peak == pytest.approx(measured(build, batch, loss), rel=UNSEEN.get(name, 0.02))
    assert sum(found.parts.values()) == pytest.approx(found.peak)
    assert found.parameters == sum(parameter.numel() for parameter in build().parameters())


@pytest.mark.parametrize("name", CASES)
def test_a_model_on_the_meta_device_is_estimated_as_one_that_is_there(name: str) -> None:
    build, batch, loss = CASES[name]
    with torch.device("meta"):
        absent = build()
    assert thrifty.estimate(absent, batch.to("meta"), loss=loss).peak == thrifty.estimate(build, batch, loss=loss).peak


def test_what_does_not_fit_comes_with_options_that_do() -> None:
    build, batch, loss = CASES["encoder"]
    whole = thrifty.estimate(build, batch, loss=loss)
    assert whole.fits and not whole.options
    tight = thrifty.estimate(build, batch, loss=loss, memory=0.6 * whole.peak)
    assert not tight.fits and tight.options
    for option in tight.options[:2]:
        again = thrifty.estimate(build, batch, loss=loss, techniques=option.techniques, memory=0.6 * whole.peak)
        assert again.fits and again.peak == pytest.approx(option.peak)
    assert "does not fit" in str(tight) and str(tight.options[0]) in str(tight)


def test_frozen_parameters_have_neither_gradients_nor_moments() -> None:
    model = encoder()
    model[1].requires_grad_(False)
    found = thrifty.estimate(model, TOKENS, loss=token_loss)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert found.parts["optimizer"] == 8 * trained


def test_a_model_of_transformers_computes_its_own_loss() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=200)
    model = transformers.GPT2LMHeadModel(config)
    found = thrifty.estimate(model, {"input_ids": TOKENS, "labels": TOKENS}, memory="1GB")
    assert found.fits and found.parameters == model.num_parameters()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch": "text"}, "without a row for each example"),
        ({"model": 3}, "no module"),
        ({"memory": "many"}, "is no size"),
        ({"optimizer": "lora"}, "is no optimizer"),
    ],
)
def test_what_cannot_be_estimated_is_refused_with_the_fix(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        thrifty.estimate(**{"model": encoder, "batch": TOKENS, "loss": token_loss, **changed})
    assert error.value.fix
