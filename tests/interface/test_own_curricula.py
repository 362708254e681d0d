"""Curricula in the trainer on the user's own data: shorter texts and smaller images in early steps, found by shape."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import thrifty
from thrifty.data.user_data import open_user_data


class Pooled(nn.Module):
    """Two classes of whatever is pooled; keeps the shapes that it was given in training."""

    shapes: list[tuple[int, ...]] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shapes.append(tuple(x.shape[1:]))
        pooled = self.table(x).mean(1) if x.ndim == 2 else x.mean((1, 2, 3)).unsqueeze(1).expand(-1, 4)
        return self.head(pooled)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[-1], reduction="none")


def trained(data: TensorDataset, technique: thrifty.Technique, folder: Path) -> set[tuple[int, ...]]:
    Pooled.shapes.clear()
    techniques = [thrifty.Sgd(lr=0.1), technique]
    thrifty.train(Pooled, data, held_out=data, loss=loss, techniques=techniques, budget=4, batch=8, runs=folder,
                  quiet=True)  # fmt: skip
    return set(Pooled.shapes)


TEXTS = TensorDataset(torch.randint(0, 20, (32, 16)), torch.ones(32, 16, dtype=torch.int64), torch.arange(32) % 2)
IMAGES = TensorDataset(torch.rand(32, 3, 16, 16), torch.arange(32) % 2)


def test_texts_are_short_at_first(tmp_path: Path) -> None:
    shapes = trained(TEXTS, thrifty.SequenceLengthWarmup(start=4, until=3, phases=2, multiple=4), tmp_path)
    assert {(4,), (16,)} <= shapes


@pytest.mark.parametrize(
    "technique",
    [
        thrifty.ResolutionCurriculum(until=3, phases=2),
        thrifty.LowFrequencyCurriculum(fractions=(0.5,), until=(2,)),
    ],
)
def test_images_are_small_at_first(technique: thrifty.Technique, tmp_path: Path) -> None:
    assert {(3, 8, 8), (3, 16, 16)} <= trained(IMAGES, technique, tmp_path)


def test_other_data_are_refused_with_their_shapes(tmp_path: Path) -> None:
    with pytest.raises(thrifty.ThriftyError, match=r"a batch has 0 \(8, 3, 16, 16\)"):
        trained(IMAGES, thrifty.SequenceLengthWarmup(), tmp_path / "texts")
    with pytest.raises(thrifty.ThriftyError, match="requires batches of images"):
        trained(TEXTS, thrifty.ResolutionCurriculum(), tmp_path / "images")
    maps = TensorDataset(torch.rand(32, 3, 16, 16), torch.rand(32, 1, 16, 16), torch.arange(32) % 2)
    with pytest.raises(thrifty.ThriftyError, match="several fields with images or maps of their size: 0, 1"):
        trained(maps, thrifty.ResolutionCurriculum(), tmp_path / "maps")


def test_micro_batches_cut_texts_to_equal_lengths() -> None:
    texts = [torch.ones(length, dtype=torch.int64) for length in (20, 90, 20, 300, 30, 100, 40, 250)]
    opened = open_user_data(texts, texts, 8, 0, lambda examples: {"ids": pad_sequence(examples, batch_first=True)})
    source = thrifty.SequenceLengthWarmup(start=16, until=100, phases=4).batches(opened.train)
    for step in (0, 30, 100):
        parts = [source.rows(step, start, start + 2)["ids"] for start in range(0, 8, 2)]
        assert [int(row.sum()) for part in parts for row in part] == source.at(step)["ids"].sum(1).tolist()


def test_labels_in_shares_are_no_map_of_an_image(tmp_path: Path) -> None:
    shares = TensorDataset(torch.rand(32, 3, 8, 8), torch.eye(8).repeat(4, 1)[:, :2].softmax(1).repeat(1, 4))
    assert shares.tensors[1].shape[1] == 8  # as many as a batch has examples, and an image rows
    source = open_user_data(shares, shares, 8, 0).train
    assert thrifty.ResolutionCurriculum(until=3, phases=2, multiple=2).batches(source).at(0)["0"].shape[2:] == (4, 4)
