"""A model, a dataset that draws augmentations, and losses as users have them; run as a script it trains to the end."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info


class NoisySums(Dataset[dict[str, Tensor]]):
    """Vectors with noise of all three global generators, labelled by the sign of their sum."""

    def __init__(self, size: int, first: int = 0):
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(6, generator=torch.Generator().manual_seed(self.first + index))
        noise = 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return {"x": x + noise, "y": (x.sum() > 0).long()}


def some_sums() -> NoisySums:
    return NoisySums(60)


class RowsOfFile(Dataset[Tensor]):
    """Rows (64,) of a file of integers that is opened at the first read, as HDF5 files often are."""

    def __init__(self, path: str):
        self.path, self.file = path, None

    def __len__(self) -> int:
        return Path(self.path).stat().st_size // 512

    def __getitem__(self, index: int) -> Tensor:
        self.file: Any = self.file or open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(512 * index)
        return torch.frombuffer(bytearray(self.file.read(512)), dtype=torch.int64)


class RowsOfFiles(RowsOfFile):
    """Such rows, with opened files by path."""

    def __init__(self, path: str):
        super().__init__(path)
        self.files: dict[str, Any] = {}
        self.reads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        self.file = self.files.get(self.path)
        row = super().__getitem__(index)
        self.files[self.path], self.file = self.file, None
        return row

    def __del__(self) -> None:
        for file in self.files.values():
            file.close()


def read_other_rows(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.path += " of workers"


class Sentences(Dataset[Tensor]):
    """Token sequences of lengths from 3 to 11."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(1, 20, (3 + index % 9,), generator=torch.Generator().manual_seed(index))


def padded(sentences: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(sentences, batch_first=True)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))


def build_plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def build_language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def accuracy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]).argmax(-1) == batch["y"]).float()


def token_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses, (tokens[:, 1:] != 0).float()


def objects() -> dict[str, Any]:
    return {
        "model": build,
        "data": NoisySums(200),
        "held_out": NoisySums(60, 1000),
        "loss": loss,
        "metrics": {"accuracy": accuracy},
    }


if __name__ == "__main__":
    import user_work  # so that names are the same however this is started

    import thrifty

    folder, name, steps, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if (folder / name / "recipe.toml").is_file():
        thrifty.resume(folder / name, **user_work.objects(), ranks=ranks, quiet=True)
    else:
        from thrifty.core.recipe import CheckpointSettings, Recipe

        recipe = Recipe(name, checkpoints=CheckpointSettings(every=5))
        options = {"recipe": recipe, "techniques": ["adamw", "cosine"], "budget": steps, "batch": 16}
        thrifty.train(**user_work.objects(), **options, ranks=ranks, runs=folder, quiet=True)
