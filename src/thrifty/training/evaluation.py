"""Loss, whatever else an objective measures, and what can be seen of its predictions, on held-out data."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective


@contextmanager
def _judged(model: nn.Module) -> Iterator[None]:
    """Without gradients and without randomness (dropout), and then as it was."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def evaluate(
    model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device
) -> dict[str, float]:
    """The means over all examples of the batches by their weights: the "loss", in nats per prediction, and what the
    objective `measures`. Every rank evaluates the same data, so that all agree to the last bit; randomness (dropout) is
    off."""
    totals = dict.fromkeys(("loss", *objective.measured), 0.0)
    weights = dict(totals)
    with _judged(model):
        for batch in batches:
            here, weight = batch.to(device), batch.weight.double()
            prediction = objective.predict(model, here)
            losses, parts = objective.losses(prediction, here), prediction.part_weights
            measures = {"loss": losses if parts is None else torch.stack([losses, parts])}
            if objective.measured:
                measures |= objective.measures(prediction, here)
            for name in totals:
                values, counts = measures[name] if measures[name].ndim > 1 else (measures[name], torch.ones(len(here)))
                totals[name] += float(values.double().cpu() @ weight)
                weights[name] += float(counts.double().cpu() @ weight)
    return {name: total / weights[name] for name, total in totals.items()}


def held_out_loss(model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device) -> float:
    """The loss alone, see `evaluate`."""
    return evaluate(model, objective, batches, device)["loss"]


@dataclass(frozen=True)
class PredictionPreview:
    """What can be seen of a model's predictions of some examples."""

    pictures: dict[str, Tensor]
    """Images (b, c, h, w), pixels as the model is given them, by what they are."""
    losses: list[float]
    """Of each example."""


def see(model: nn.Module, objective: Objective, batch: Batch, count: int, device: torch.device) -> PredictionPreview:
    """Predictions of the first `count` examples of a batch to look at, of an objective that has such (`pictured`). The
    model is given all of the batch, since of another size it might be compiled anew. Every rank must ask for them."""
    with _judged(model):
        here = batch.to(device)
        prediction = objective.predict(model, here)
        losses = objective.losses(prediction, here)[:count]
        pictures = {name: images[:count] for name, images in objective.image_previews(prediction, here).items()}
        return PredictionPreview(pictures, losses.tolist())
