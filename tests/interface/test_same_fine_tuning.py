"""The same fine-tuning of a small text classifier in every trainer gives the same weights."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_trainer_work import ParityOfSums, classifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

import thrifty
from thrifty.data.user_data import open_user_data

pytestmark = pytest.mark.slow
STEPS, BATCH = 8, 8
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
Examples = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def examples() -> Examples:
    """The examples of the steps in the order in which thrifty.train goes through them."""
    data, found = open_user_data(ParityOfSums(), ParityOfSums(), BATCH, 0), []
    for step in range(STEPS):
        batch = data.assembled(data.train.at(step))
        found += [{name: tensor[row] for name, tensor in batch.items()} for row in range(BATCH)]
    return found


def adapted() -> nn.Module:
    return thrifty.apply(classifier(), "lora", rank=4)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


@pytest.fixture(scope="module")
def by_hand(examples: Examples) -> dict[str, Tensor]:
    model = adapted().train()
    optimizer = thrifty.optim.AdamW(model, **ADAMW)
    for batch in DataLoader(examples, BATCH):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained(model)


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and any("lora_b" in name for name in wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6, msg=name)


def test_in_thriftys_own_trainer(by_hand: dict[str, Tensor], tmp_path: Path) -> None:
    techniques = [thrifty.AdamW(**ADAMW), thrifty.Lora(rank=4)]
    last: list[dict[str, Tensor]] = []
    thrifty.train(
        classifier(), ParityOfSums(), held_out=ParityOfSums(), techniques=techniques, budget=STEPS, batch=BATCH, seed=0,
        runs=tmp_path, name="own", quiet=True, observers=[lambda record: last.append(trained(record.model))],
    )  # fmt: skip
    assert_near(last[-1], by_hand)


@pytest.mark.parametrize("way", ["optimizers", "optimizer_cls_and_kwargs"])
def test_in_the_trainer_of_transformers(
    examples: Examples, by_hand: dict[str, Tensor], tmp_path: Path, way: str
) -> None:
    transformers = pytest.importorskip("transformers")

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(examples)

    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=STEPS, max_grad_norm=0.0,
        per_device_train_batch_size=BATCH, lr_scheduler_type="constant", learning_rate=1e-2, weight_decay=0.0,
    )  # fmt: skip
    model = adapted()
    own = {"optimizers": (thrifty.optim.AdamW(model, **ADAMW), None)}
    late = {"optimizer_cls_and_kwargs": (thrifty.optim.AdamW, ADAMW)}
    InOrder(model, arguments, train_dataset=examples, **(own if way == "optimizers" else late)).train()
    assert_near(trained(model), by_hand)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_through_accelerate(examples: Examples, by_hand: dict[str, Tensor], accumulation: int) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = adapted().train()
    optimizer = thrifty.optim.AdamW(model, **ADAMW)
    loader = DataLoader(examples, BATCH // accumulation)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert_near(trained(model), by_hand)


def test_in_lightning(examples: Examples, by_hand: dict[str, Tensor], tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = adapted()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            optimizer = thrifty.optim.AdamW(self.model, **ADAMW)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0), "interval": "step"},
            }

    def fit(epochs: int, **resumed: Any) -> tuple[Any, dict[str, Tensor]]:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        module = Classifier()
        trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        trainer.fit(module, DataLoader(examples, BATCH), **resumed)
        return trainer, trained(module.model)

    once, found = fit(1)
    assert_near(found, by_hand)
    once.save_checkpoint(tmp_path / "last.ckpt")
    _, resumed = fit(2, ckpt_path=str(tmp_path / "last.ckpt"))
    _, whole = fit(2)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_averaged_models_of_torch_follow_a_model_with_adapters(examples: Examples) -> None:
    model = adapted().train()
    optimizer = thrifty.optim.AdamW(model, **ADAMW)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    means = {name: np.zeros(tuple(value.shape)) for name, value in trained(model).items()}
    batches = [*DataLoader(examples, BATCH)]
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        means = {name: means[name] + value.numpy() / len(batches) for name, value in trained(model).items()}
    for name, value in trained(averaged.module).items():
        np.testing.assert_allclose(value.numpy(), means[name], rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        before = averaged(**batches[0]).logits
        for parameter in copy.deepcopy(model).parameters():
            parameter.zero_()
        assert torch.equal(averaged(**batches[0]).logits, before)
