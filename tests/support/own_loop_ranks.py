"""A training loop of the user's own in one of several processes, as torchrun starts them."""

import torch
import torch.distributed as dist
from tiny_models import FAMILIES, random_model
from torch import Tensor, nn

import thrifty
from thrifty.core.mesh import clear_mesh
from thrifty.core.state import full_value

STEPS, BATCH = 3, 4


def language_model() -> nn.Module:
    """Return a Llama with the same weights at every call."""
    return random_model(FAMILIES["llama-grouped"]()).train()


def batch_of(step: int) -> Tensor:
    return torch.randint(0, 300, (BATCH, 12), generator=torch.Generator().manual_seed(step))


def trained_by_hand(
    chosen: str = "",
    divides_data: bool = False,
    also: tuple[str, ...] = (),
    accumulate: int = 1,
    clips_in_update: bool = False,
) -> dict[str, Tensor]:
    """Return float64 weights after some steps; with data parallelism each rank has a part of the batch."""
    clear_mesh()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if divides_data else (0, 1)
    model = language_model().double()
    if rank and chosen == "replicate":
        nn.init.normal_(next(model.parameters()))  # training starts with the first rank's weights
    for name in also:
        model = thrifty.apply(model, name, **({"rank": 4} if name == "lora" else {}))
    model = thrifty.apply(model, chosen) if chosen else model
    optimizer = thrifty.optim.AdamW(model, lr=1e-2)
    if clips_in_update:
        optimizer = thrifty.apply(optimizer, "clip", max_norm=1.0)
    for step in range(STEPS):
        rows = batch_of(step).chunk(ranks)[rank]
        for part in rows.chunk(accumulate):
            (model(input_ids=part, labels=part, use_cache=False).loss / accumulate).backward()
        if not clips_in_update:  # torch's clipping accepts no mixture of whole and divided gradients
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: full_value(parameter.detach()) for name, parameter in model.named_parameters()}


def difference_by_hand(chosen: str, divides_data: bool, also: tuple[str, ...] = (), accumulate: int = 1) -> float:
    """Return the largest difference of a weight from the loop of one process."""
    own_clip = chosen == "tensor"
    found = trained_by_hand(chosen, divides_data, also, accumulate, own_clip)
    alone = trained_by_hand(also=also, clips_in_update=own_clip)
    return max(float((found[name] - value).abs().max()) for name, value in alone.items())


def refusals_by_hand() -> dict[str, str]:
    """Return the messages with which techniques refuse a group of ranks."""
    messages = {}
    for key, names, settings in (
        ("stage 1", ["shard"], {"zero": 1}),
        ("after sharding", ["shard", "lora"], {}),
        ("both", ["tensor", "replicate"], {}),
        ("twice", ["replicate", "replicate"], {}),
    ):
        clear_mesh()
        model = language_model()
        try:
            for name in names:
                model = thrifty.apply(model, name, **settings)
        except thrifty.ThriftyError as refused:
            messages[key] = str(refused)
    clear_mesh()
    return messages
