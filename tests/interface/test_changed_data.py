"""Techniques on the loaders and datasets of the user's own loop do what they do in the trainer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_runs import technique
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import thrifty
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.errors import RefusedError, UsageError
from thrifty.kernels.image_resizing import resize
from thrifty.kernels.low_pass import crop_spectrum

STEPS = 8


class Texts(Dataset[dict[str, Tensor]]):
    """Token ids with a mask and a label for each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.arange(16) + 100 * index
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor(index % 2)}


class InTrainer(BatchSource):
    """The trainer's view of batches that a loader gives one after another."""

    batch = 4

    def __init__(self, field: str, tensors: list[Tensor]):
        self.field, self.tensors = field, tensors

    def rows(self, step: int, start: int, stop: int) -> Batch:
        return Batch({self.field: self.tensors[step][start:stop]}, torch.ones(stop - start))


def test_text_lengths_follow_the_trainer_over_epochs() -> None:
    chosen, loader = technique("curriculum.sequence_length"), DataLoader(Texts(), batch_size=4)
    changed = thrifty.apply(loader, chosen)
    assert len(changed) == len(loader) and changed.dataset is loader.dataset
    batches = [*changed, *changed]
    tokens = [torch.cat([batch["input_ids"], batch["input_ids"][:, -1:]], 1) for batch in [*loader, *loader]]
    source = chosen.batches(InTrainer("tokens", tokens))
    lengths = [source.at(step)["tokens"].shape[1] - 1 for step in range(12)]
    assert [batch["input_ids"].shape[1] for batch in batches] == lengths and lengths[0] < lengths[-1] == 16
    for batch, plain, length in zip(batches, [*loader, *loader], lengths, strict=True):
        assert torch.equal(batch["input_ids"], plain["input_ids"][:, :length])
        assert batch["attention_mask"].shape[1] == length and torch.equal(batch["labels"], plain["labels"])


@pytest.mark.parametrize(
    ("name", "function"), [("curriculum.resolution", resize), ("curriculum.low_frequency", crop_spectrum)]
)
def test_image_sizes_follow_the_trainer(name: str, function: Any) -> None:
    images = torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(images, torch.arange(24)), batch_size=4)
    chosen = technique(name)
    found = [*thrifty.apply(loader, chosen)]
    source = chosen.batches(InTrainer("inputs", [batch[0] for batch in loader]))
    for step, (changed, labels) in enumerate(found):
        assert torch.equal(changed, source.at(step)["inputs"])
        assert labels.tolist() == [*range(4 * step, 4 * step + 4)]
    assert found[0][0].shape[-1] < found[-1][0].shape[-1] == 16
    side = found[0][0].shape[-1]
    assert torch.equal(found[0][0], function(images[:4], side, side))


def test_batch_ramp_follows_the_trainer_and_covers_each_epoch() -> None:
    chosen = technique("large_batch.batch_ramp")
    loader = DataLoader(TensorDataset(torch.arange(24)), batch_size=8)
    changed = thrifty.apply(loader, chosen)
    expected = len(changed)
    first, second = ([batch[0] for batch in changed] for _ in range(2))
    sizes = [chosen.batches(SizedSource()).size(step) for step in range(len(first) - 1)]
    assert [len(batch) for batch in first][:-1] == sizes and sizes[0] < 8
    assert torch.cat(first).tolist() == torch.cat(second).tolist() == [*range(24)]
    assert len(first) == expected and [len(batch) for batch in second] == [8, 8, 8]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_ramp_resumes_at_the_next_batch(workers: int) -> None:
    def ramp() -> Any:
        loader = DataLoader(TensorDataset(torch.arange(64)), 8, num_workers=workers)
        return thrifty.apply(loader, "batch_ramp", total_steps=STEPS, start=0.25, until=1.0, multiple=2)

    whole, stopped, resumed = [len(batch[0]) for batch in ramp()], ramp(), ramp()
    received = iter(stopped)
    for _ in range(5):
        next(received)
    resumed.load_state_dict(stopped.state_dict())
    expected = len(resumed)
    sizes = [len(batch[0]) for batch in resumed]
    assert sizes[:4] == whole[5:9] and sizes[0] > whole[0] and len(sizes) == expected


class SizedSource(BatchSource):
    batch = 8


def test_pruned_datasets_and_loaders_read_a_subset() -> None:
    kept = thrifty.apply(Texts(), "prune", order="random", keep=0.5)
    assert isinstance(kept, Subset) and len(kept) == 12
    loader = thrifty.apply(DataLoader(Texts(), batch_size=4, shuffle=True), "prune", order="random", keep=0.5)
    seen = torch.cat([batch["input_ids"][:, 0] for batch in loader]) // 100
    assert sorted(seen.tolist()) == sorted(kept.indices)


def test_the_number_of_the_next_batch_is_saved_and_restored() -> None:
    changed = thrifty.apply(DataLoader(Texts(), batch_size=4), technique("curriculum.sequence_length"))
    whole = [batch["input_ids"].shape[1] for batch in [*changed, *changed]]
    again = thrifty.apply(DataLoader(Texts(), batch_size=4), technique("curriculum.sequence_length"))
    stopped = iter(again)
    next(stopped), next(stopped)
    other = thrifty.apply(DataLoader(Texts(), batch_size=4), technique("curriculum.sequence_length"))
    other.load_state_dict(again.state_dict())
    assert [batch["input_ids"].shape[1] for batch in other] == whole[2:8]


class Stream(IterableDataset[tuple[Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter([(torch.arange(16),)] * 8)


@pytest.mark.parametrize(
    ("data", "name", "message"),
    [
        (lambda: DataLoader(TensorDataset(torch.rand(8, 4)), 4), "sequence_length", "can truncate integers"),
        (lambda: [{"x": torch.ones(4, 8).long(), "y": torch.ones(4, 6).long()}], "sequence_length", "single examples"),
        (lambda: iter([(torch.ones(4, 8).long(), torch.ones(4, 6).long())]), "sequence_length", "of one length"),
        (lambda: iter([(torch.ones(4, 8).long(), torch.ones(4, 8, 8))]), "sequence_length", "of one length"),
        (lambda: iter([{"ids": torch.ones(4, 8).long(), "cu_seqlens": torch.ones(3)}]), "sequence_length", "one label"),
        (
            lambda: iter([{"x": torch.ones(1, 8).long(), "attention_mask": torch.tensor([[0] * 2 + [1] * 6])}]),
            "sequence_length", "on the left",
        ),
        (lambda: DataLoader(Texts(), 4), "resolution", "batches of images"),
        (lambda: iter([(torch.rand(2, 3, 16, 16), torch.rand(2, 1, 16, 16))]), "resolution", "maps of their size"),
        (lambda: iter([torch.zeros(2, 3, 16, 16).byte()]), "resolution", "not floats"),
        (lambda: DataLoader(Stream(), 4), "batch_ramp", "requires a DataLoader"),
        (lambda: iter([]), "prune", "can be read once only"),
    ],
)  # fmt: skip
def test_batches_that_a_technique_does_not_fit_are_refused(data: Any, name: str, message: str) -> None:
    settings = {"order": "random"} if name == "prune" else {"batch": 8} if name == "batch_ramp" else {}
    with pytest.raises(UsageError, match=message):
        for _ in thrifty.apply(data(), name, total_steps=STEPS, **settings):
            pass


def test_the_same_is_not_changed_twice_and_other_things_are() -> None:
    loader = thrifty.apply(DataLoader(Texts(), 4), "sequence_length", total_steps=STEPS)
    with pytest.raises(UsageError, match="change the same part"):
        thrifty.apply(loader, "sequence_length", total_steps=STEPS)
    ramp = thrifty.apply(DataLoader(Texts(), 8), "batch_ramp", total_steps=STEPS, start=0.25, multiple=2)
    both = [*thrifty.apply(ramp, "sequence_length", total_steps=STEPS, start=8)]
    assert both[0]["input_ids"].shape == (2, 8) and both[-1]["input_ids"].shape[1] == 16


@pytest.mark.parametrize("name", ["sequence_length", "resolution", "low_frequency", "prune"])
def test_a_data_technique_names_its_target(name: str) -> None:
    with pytest.raises(UsageError, match="changes the loader") as refused:
        thrifty.apply(nn.Linear(2, 2), name)
    assert refused.value.fix.startswith("thrifty.apply(loader, ")
    assert not isinstance(refused.value, RefusedError)


def test_a_technique_of_models_is_not_for_data() -> None:
    with pytest.raises(UsageError, match=r"adapters\.lora changes the model"):
        thrifty.apply(DataLoader(Texts(), 4), "lora")
    with pytest.raises(UsageError, match="a fraction of a run"):
        thrifty.apply(DataLoader(Texts(), 4), "low_frequency")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_z_loss_adds_the_squared_log_normalizer_per_prediction(reduction: str, weighted: bool) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 5).double().requires_grad_(), torch.tensor([0, 1, -100, 3, 4, 1])
    weight = torch.rand(5).double() if weighted else None
    settings = {"reduction": reduction, "weight": weight}
    found = thrifty.apply(nn.CrossEntropyLoss(**settings), "z_loss", coefficient=0.1)(logits, target)
    shares = torch.where(target == -100, 0.0, weight[target.clamp(0)] if weighted else 1.0).double()
    terms = 0.1 * logits.logsumexp(1).square() * shares
    expected = {"none": terms, "sum": terms.sum(), "mean": terms.sum() / shares.sum()}[reduction]
    torch.testing.assert_close(found, nn.CrossEntropyLoss(**settings)(logits, target) + expected)
    deep = torch.randn(2, 5, 3).double()
    assert thrifty.apply(nn.CrossEntropyLoss(), "z_loss")(deep, torch.ones(2, 3).long()).ndim == 0
