"""Loss on held-out data."""

from collections.abc import Iterable

import torch
from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective


@torch.no_grad()
def held_out_loss(model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device) -> float:
    """The mean loss over all examples of the batches by their weights, in nats per prediction. Every rank evaluates the
    same data, so that all agree to the last bit; randomness (dropout) is off."""
    was_training = model.training
    model.eval()
    total, weights = 0.0, 0.0
    for batch in batches:
        losses = objective.losses(objective.predict(model, batch.to(device)), batch.to(device))
        weight = batch.weight.double()
        total += float(losses.double().cpu() @ weight)
        weights += float(weight.sum())
    model.train(was_training)
    return total / weights
