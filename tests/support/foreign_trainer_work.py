"""A small classifier and its examples for trainers of other libraries, and what ranks of FSDP2 do with an optimizer."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

from thrifty.interface.optimizers import optimizer_named


class ParityOfSums(Dataset[dict[str, Tensor]]):
    """Token sequences, labelled by whether their sum is odd."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(1, 100, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": (tokens.sum() % 2).long()}


def classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=100, **sizes, **dropouts))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    return nn.Sequential(*layers).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, part: slice = slice(None)) -> None:
    for step in steps:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).double()[part]
        optimizer.zero_grad()
        (model(x) - x[:, :2]).square().mean().backward()
        optimizer.step()


def sharded_and_restored(name: str, folder: Path) -> dict[str, float]:
    """The largest difference to a run on one rank of one that is sharded, saved and restored, into shards and whole."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh, part = init_device_mesh("cpu", (size,)), slice(rank * 16 // size, (rank + 1) * 16 // size)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_named(name)(model, total_steps=20)

    def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        fully_shard(model, mesh=mesh)
        return model, optimizer(model)

    reference = network()
    alone = optimizer(reference)
    train(reference, alone, range(6))
    model, first = sharded()
    train(model, first, range(3), part)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, first), strict=True)), checkpoint_id=folder)
    restored, second = sharded()
    state = dict(zip(("model", "optimizer"), get_state_dict(restored, second), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(restored, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(restored, second, range(3, 6), part)
    whole: list[Any] = list(
        get_state_dict(model, first, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    )
    dist.broadcast_object_list(whole, 0)
    plain = network()
    third = optimizer(plain)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(plain, third, model_state_dict=whole[0], optim_state_dict=whole[1], options=options)
    train(plain, third, range(3, 6))
    found = {}
    for how, own in (("shards", restored), ("whole", plain)):
        values = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in own.parameters()]
        pairs = zip(values, reference.parameters(), strict=True)
        found[how] = max(float((one - other).abs().max()) for one, other in pairs)
    return found
