"""Optimizers and adapters of the toolkit inside trainers that people already use."""

from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_trainer_work import ParityOfSums, classifier, sharded_and_restored
from rank_processes import on_ranks
from torch import Tensor, nn

import thrifty
from thrifty.interface.optimizers import optimizer_names

SPREAD = {"Soap": 0.05}
"""Largest difference after six steps where it is not rounding alone: SOAP's axes of directions without a gradient are
decided by rounding (see its card)."""
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trainer(folder: Path, model: nn.Module, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    settings = {"max_steps": 8, "save_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1}
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "lr_scheduler_type": "linear"}
    arguments = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings, **optimizer
    )
    return transformers.Trainer(model, arguments, train_dataset=ParityOfSums(), **more)


def test_adamw_in_hf_trainer_equals_torch_and_resumes_exactly(
    tmp_path: Path,
) -> None:
    theirs = trainer(tmp_path / "theirs", classifier())
    theirs.train()
    ours = trainer(tmp_path / "ours", classifier(), optimizer_cls_and_kwargs=(thrifty.optim.AdamW, ADAMW))
    ours.train()
    torch.testing.assert_close(weights(ours.model), weights(theirs.model), rtol=1e-6, atol=1e-7)
    again = trainer(tmp_path / "again", classifier(), optimizer_cls_and_kwargs=(thrifty.optim.AdamW, ADAMW))
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-4"))
    assert torch.equal(weights(again.model), weights(ours.model))


def test_lora_and_muon_in_hf_trainer_train_only_adapters(tmp_path: Path) -> None:
    model = thrifty.apply(classifier(), "lora", rank=4)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer(tmp_path, model, optimizers=(thrifty.optim.Muon(model, lr=1e-2), None)).train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon"])
def test_accelerate_resumes_an_optimizer_bit_for_bit(name: str, tmp_path: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    model = classifier()
    optimizer = getattr(thrifty.optim, name)(model, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader = torch.utils.data.DataLoader(ParityOfSums(), batch_size=8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def train(saved_after: int | None, first: int = 0) -> Tensor:
        for number, batch in enumerate(loader):
            if number < first:
                continue
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if number == saved_after:
                accelerator.save_state(str(tmp_path / "state"))
        return weights(model)

    whole = train(saved_after=3)
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(train(None, first=4), whole)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", optimizer_names())
def test_fsdp2_optimizers_restore_from_distributed_checkpoints(name: str, tmp_path: Path) -> None:
    for found in on_ranks(2, sharded_and_restored, name, tmp_path / "checkpoint"):
        assert max(found.values()) < SPREAD.get(name, 1e-9), found
