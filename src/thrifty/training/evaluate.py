"""Loss on held-out data."""

from collections.abc import Iterable

import torch
from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective


@torch.no_grad()
def held_out_loss(model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device) -> float:
    """The mean loss over all examples of the batches, in nats per prediction. Every rank evaluates the same data, so
    that all agree to the last bit; randomness (dropout) is off."""
    was_training = model.training
    model.eval()
    total, examples = 0.0, 0
    for batch in batches:
        losses = objective.losses(objective.predict(model, batch.to(device)), batch.to(device))
        total += float(losses.double().sum())
        examples += len(batch)
    model.train(was_training)
    return total / examples
