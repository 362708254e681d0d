"""Evaluation on held-out data: loss, metrics and previews of predictions."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thrifty.core.batches import Batch
from thrifty.core.objective import Objective, Prediction
from thrifty.core.recipe import Recipe

EVALUATIONS = 10
"""Least number of evaluations in a run. They draw the curve of the held-out loss."""
EVALUATION_COST = 0.05
"""Maximum fraction of the work of training steps for evaluations in addition to the recipe's."""
FORWARD = 1 / 3
"""Fraction of a training step's work that is its forward pass."""


def evaluation_interval(recipe: Recipe, steps: int) -> int:
    """Return the number of steps between evaluations in a run of `steps` steps.

    It is at most the recipe's number, and small enough for `EVALUATIONS` evaluations, unless these cost more than
    `EVALUATION_COST`. Patience counts evaluations, so with patience it is the recipe's number, unless the run would end
    before patience could stop it. With a budget in seconds, the cost is not limited, because evaluations measure the
    duration of the last evaluation.
    """
    settings = recipe.evaluation
    if (patience := settings.patience) is not None:
        return settings.every if steps > patience * settings.every else max(1, steps // (4 * patience))
    cost = 0.0 if recipe.budget.seconds else FORWARD * settings.examples / recipe.data.batch
    return min(settings.every, max(steps // EVALUATIONS, math.ceil(cost / EVALUATION_COST), 1))


def note_on_patience(recipe: Recipe, steps: int) -> str:
    """Return a note if patience changes the interval of evaluations, or cannot stop a run of `steps` steps."""
    patience, every = recipe.evaluation.patience, evaluation_interval(recipe, steps)
    if patience is None or every == recipe.evaluation.every:
        return ""
    if steps <= patience:
        return f"caution: patience {patience} cannot stop a run of {steps} steps"
    usual = f"evaluation.every = {recipe.evaluation.every}"
    return f"evaluating every {every} steps, not {usual}, so that patience {patience} can stop a run of {steps} steps"


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch off gradients, randomness (dropout) and compilation inside the context, then restore the training mode.

    Compiling the forward pass a second time, without gradients, would take longer than most evaluations.
    """
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
    model.train(was_training)


def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    device: torch.device,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, float]:
    """Return the mean "loss" and metrics of an objective over all examples, weighted by `Batch.weight`.

    The loss is in nats per prediction. Corpus-level metrics, such as F1, are included. Every rank evaluates the same
    data, so results are bit-identical on all ranks. Randomness (dropout) is off.

    A measure that is a mean over a batch includes only batches as large as the first batch. `say` receives a line about
    the excluded batches.
    """
    totals = dict.fromkeys(("loss", *objective.measured), 0.0)
    weights = dict(totals)
    rows: dict[str, list[Tensor]] = {name: [] for name in objective.collected}
    left_out: dict[str, int] = {}
    size = 0
    with _evaluation_mode(model):
        for batch in batches:
            size = size or len(batch)
            here, weight = batch.to(device), batch.weight.double()
            prediction = objective.predict(model, here)
            measures = {"loss": _losses(objective, prediction, here)}
            if objective.metrics:
                measures |= objective.measures(prediction, here)
            for name, chunks in rows.items():
                chunks.append(measures[name].cpu())
            for name in totals:
                value = measures[name]
                if value.ndim == 0 and len(batch) != size:
                    left_out[name] = left_out.get(name, 0) + len(batch)
                    continue
                values, counts = value if value.ndim > 1 else (value.expand(len(batch)), torch.ones(len(batch)))
                totals[name] += float(values.cpu().double() @ weight)
                weights[name] += float(counts.cpu().double() @ weight)
        whole = {name: torch.cat(chunks) for name, chunks in rows.items()}
        overall = objective.overall(model, whole) if objective.summarized else {}
    for name, examples in left_out.items():
        say(f"held-out {name} is a mean over batches of {size}: the last {examples} examples are not counted")
    means = {name: total / weights[name] if weights[name] else math.nan for name, total in totals.items()}
    return {name: (means | overall)[name] for name in ("loss", *objective.metrics)}


def try_measures(model: nn.Module, objective: Objective, batch: Batch) -> None:
    """Call the measures of an objective on a batch, to raise their errors early."""
    with _evaluation_mode(model):
        objective.measures(objective.predict(model, batch), batch)


def _losses(objective: Objective, prediction: Prediction, batch: Batch) -> Tensor:
    """Return the losses of a batch in the format of `Objective.measures`."""
    losses = objective.losses(prediction, batch)
    if prediction.is_mean:
        return losses.mean()
    return losses if prediction.part_weights is None else torch.stack([losses, prediction.part_weights])


def held_out_loss(model: nn.Module, objective: Objective, batches: Iterable[Batch], device: torch.device) -> float:
    """Return only the loss of `evaluate`."""
    return evaluate(model, objective, batches, device)["loss"]


@dataclass(frozen=True)
class PredictionPreview:
    """Predictions of some examples as images, with the loss of each example."""

    pictures: dict[str, Tensor]
    """Images (b, c, h, w) by caption, with pixels scaled as the model's inputs."""
    losses: list[float]


def see(model: nn.Module, objective: Objective, batch: Batch, count: int, device: torch.device) -> PredictionPreview:
    """Return previews of the first `count` examples of a batch, for an objective with `pictured` set. The model
    processes the whole batch, because a smaller batch could trigger a recompilation. Every rank must call this."""
    with _evaluation_mode(model):
        here = batch.to(device)
        prediction = objective.predict(model, here)
        losses = objective.losses(prediction, here)[:count]
        pictures = {name: images[:count] for name, images in objective.image_previews(prediction, here).items()}
        return PredictionPreview(pictures, losses.tolist())
