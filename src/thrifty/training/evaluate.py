"""Loss, and whatever else an objective measures, on held-out data."""

from collections.abc import Iterable

import torch
from torch import nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective


@torch.no_grad()
def evaluate(
    model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device
) -> dict[str, float]:
    """The means over all examples of the batches by their weights: the "loss", in nats per prediction, and what the
    objective `measures`. Every rank evaluates the same data, so that all agree to the last bit; randomness (dropout) is
    off."""
    was_training = model.training
    model.eval()
    totals, weights = dict.fromkeys(("loss", *objective.measured), 0.0), 0.0
    for batch in batches:
        here, weight = batch.to(device), batch.weight.double()
        prediction = objective.predict(model, here)
        found = {"loss": objective.losses(prediction, here)}
        if objective.measured:
            found |= objective.measures(prediction, here)
        for name in totals:
            totals[name] += float(found[name].double().cpu() @ weight)
        weights += float(weight.sum())
    model.train(was_training)
    return {name: total / weights for name, total in totals.items()}


def held_out_loss(model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device) -> float:
    """The loss alone, see `evaluate`."""
    return evaluate(model, objective, batches, device)["loss"]
