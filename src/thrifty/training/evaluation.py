"""Loss, whatever else an objective measures, and what can be seen of its predictions, on held-out data."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction


@contextmanager
def _judged(model: nn.Module) -> Iterator[None]:
    """Without gradients and without randomness (dropout), and then as it was."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """The means over all examples of the batches by their weights: the "loss", in nats per prediction, and what the
    objective `measures`; and what it makes of all of them together. Every rank evaluates the same data, so that all
    agree to the last bit; randomness (dropout) is off.

    A mean over the rows of a batch counts only where the batch is as large as the first; `say` gets a line about
    those that are not.
    """
    totals = dict.fromkeys(("loss", *objective.measured), 0.0)
    weights = dict(totals)
    rows: dict[str, list[Tensor]] = {name: [] for name in objective.collected}
    left_out: dict[str, int] = {}
    size = 0
    with _judged(model):
        for batch in batches:
            size = size or len(batch)
            here, weight = batch.to(device), batch.weight.double()
            prediction = objective.predict(model, here)
            measures = {"loss": _losses(objective, prediction, here)}
            if objective.metrics:
                measures |= objective.measures(prediction, here)
            for name, kept in rows.items():
                kept.append(measures[name].cpu())
            for name in totals:
                value = measures[name]
                if value.ndim == 0 and len(batch) != size:
                    left_out[name] = left_out.get(name, 0) + len(batch)
                    continue
                values, counts = value if value.ndim > 1 else (value.expand(len(batch)), torch.ones(len(batch)))
                totals[name] += float(values.double().cpu() @ weight)
                weights[name] += float(counts.double().cpu() @ weight)
        whole = {name: torch.cat(kept) for name, kept in rows.items()}
        overall = objective.overall(model, whole) if objective.summarized else {}
    for name, examples in left_out.items():
        say(f"held-out {name} is a mean over each batch of {size}: the last {examples} examples do not count in it")
    means = {name: total / weights[name] if weights[name] else math.nan for name, total in totals.items()}
    return {name: (means | overall)[name] for name in ("loss", *objective.metrics)}


def _losses(objective: Objective, prediction: Prediction, batch: Batch) -> Tensor:
    """Return the losses of a batch as `Objective.measures` returns metrics."""
    losses = objective.losses(prediction, batch)
    if prediction.is_mean:
        return losses.mean()
    return losses if prediction.part_weights is None else torch.stack([losses, prediction.part_weights])


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
