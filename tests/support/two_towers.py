"""Models with two encoders, their pairs, and losses that compare all examples of a batch."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from thrifty.core import mesh
from thrifty.core.backward import plain_backward
from thrifty.core.batches import Batch
from thrifty.objectives.embedding_loss import EmbeddingLoss, objective_of

PAIRS = 12


class TwoTowers(nn.Module):
    """Two linear encoders of vectors (b, 4) and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        vectors = F.normalize(self.first(batch["x"]), dim=-1), F.normalize(self.second(batch["y"]), dim=-1)
        return torch.stack((self.scale.exp() * vectors[0], vectors[1]), 1)


def two_towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers().double()


def embeddings(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch)


def each(vectors: Tensor) -> Tensor:
    logits = vectors[:, 0] @ vectors[:, 1].T
    own = torch.arange(len(logits))
    cross_entropy = partial(F.cross_entropy, reduction="none")
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


def mean(vectors: Tensor) -> Tensor:
    return each(vectors).mean()


def mean_of_batch(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a contrastive loss as a user may write it: a number for the batch."""
    return mean(model(batch))


LOSSES = {"CLIP": EmbeddingLoss(embeddings), "each": EmbeddingLoss(embeddings, each)}
LOSSES["mean"] = EmbeddingLoss(embeddings, mean)


class Pairs(Dataset):
    def __len__(self) -> int:
        return PAIRS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=draws, dtype=torch.float64)
        return {"x": x, "y": x + 0.1 * torch.randn(4, generator=draws, dtype=torch.float64)}


def pairs(examples: int = PAIRS) -> Batch:
    rows = [Pairs()[index] for index in range(examples)]
    fields = {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")}
    return Batch(fields, torch.full((examples,), 1 / examples, dtype=torch.float64))


def gradient_on_ranks(name: str) -> list[float]:
    """Return the gradient of the first encoder's bias, summed over data-parallel ranks with parts of the pairs."""
    count = dist.get_world_size()
    mesh.set_mesh({"pipeline": 1, "replicate": count, "shard": 1, "tensor": 1}, "cpu")
    model, size = two_towers(), PAIRS // count
    part = pairs().rows(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    plain_backward(model, objective_of(LOSSES[name], lambda batch: dict(batch.fields)), part)
    gradient = model.first.bias.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    return gradient.tolist()
