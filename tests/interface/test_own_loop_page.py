"""The code of a loop of one's own, as a user writes it, on models of five kinds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from benchmarks.technique_table import NanoGPT
from foreign_trainer_work import classifier
from tiny_models import FAMILIES, TWO_SIDED, random_model
from torch import Tensor, nn

import thrifty as th

TOKENS = torch.randint(1, 100, (4, 12), generator=torch.Generator().manual_seed(0))


class EncoderClassifier(nn.Module):
    """Two classes of token sequences, by an `nn.TransformerEncoder`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 2)
        self.out = nn.Linear(32, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.table(tokens)).mean(1))


def of_classes(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch), batch.sum(1) % 2)


def of_tokens(model: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])


def of_labels(model: nn.Module, batch: Tensor) -> Tensor:
    labels = batch.sum(1) % 2 if isinstance(model, transformers.BertForSequenceClassification) else batch
    return model(input_ids=batch, labels=labels).loss


MODELS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module, Tensor], Tensor]]] = {
    "nanoGPT": (NanoGPT, of_tokens),
    "nn.TransformerEncoder": (EncoderClassifier, of_classes),
    "decoder of transformers": (lambda: random_model(FAMILIES["llama-grouped"]()), of_labels),
    "classifier of transformers": (classifier, of_labels),
    "encoder-decoder of transformers": (lambda: random_model(TWO_SIDED["marian"]()), of_labels),
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable[[nn.Module, Tensor], Tensor]) -> float:
    loss = loss_fn(model, TOKENS)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("name", MODELS)
def test_techniques_one_after_another(name: str) -> None:
    build, loss_fn = MODELS[name]
    model = build().train()
    before = [key for key, _ in model.named_parameters()]
    assert th.apply(model, "lora", rank=8) is model
    assert [key for key, _ in model.named_parameters() if "lora_" not in key] == before
    assert "adapted: " in str(th.summary(model)) and "it is the head" in str(th.summary(model))
    assert 0 < th.summary(model).trainable < th.summary(model).parameters
    optimizer = th.optim.AdamW(model, lr=1e-2)
    optimizer = th.apply(optimizer, "optimizer_state", format="int8", min_elements=1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    losses = []
    for _ in range(6):
        with th.activation_budget(model, "50%"):
            loss = loss_fn(model, TOKENS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_muon_under_masks_that_move(name: str) -> None:
    build, loss_fn = MODELS[name]
    model = build().train()
    optimizer = th.optim.Muon(model, lr=1e-3)
    model, optimizer = th.apply((model, optimizer), "rigl", density=0.2, every=2, total_steps=10)
    losses = [step(model, optimizer, loss_fn) for _ in range(6)]
    assert losses[-1] < losses[0]
    masked = [value for key, value in model.named_parameters() if value.ndim == 2 and (value == 0).float().mean() > 0.5]
    assert masked
    with pytest.raises(th.NeedsTrainer, match=r"growth\.layer_drop changes .*\n  fix: thrifty\.train"):
        th.apply(model, "layer_drop")


def test_a_chunked_loss_is_that_of_all_logits() -> None:
    hidden, head, labels = torch.randn(4, 12, 8), torch.randn(100, 8), TOKENS
    whole = nn.functional.cross_entropy((hidden @ head.T).transpose(1, 2), labels)
    torch.testing.assert_close(th.losses.chunked_cross_entropy(hidden, head, labels), whole)
