"""Small models for studies of data selection: a task, a training run, and the number of steps at equal compute.

The unit of compute is a plain step, which scores no examples. A plain step costs 3 forward passes per example: one
forward pass, and one backward pass that costs as much as two.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core.backward import plain_backward
from thrifty.core.batches import Batch, BatchSource
from thrifty.core.objective import Objective
from thrifty.core.recipe import DataSettings
from thrifty.core.technique import Technique
from thrifty.data.epoch_sampler import HeldOutExamples
from thrifty.data.images.image_data import open_images
from thrifty.data.text.token_windows import HeldOutWindows, PackedTokens
from thrifty.experiments.tasks.language_task import llama, source_text
from thrifty.experiments.tasks.whole_run import in_steps, initialized
from thrifty.models.model_config import ModelConfig
from thrifty.objectives.classification import Classification
from thrifty.objectives.next_token import NextToken
from thrifty.techniques.data_selection.gradient_norm_sampling import variance_reduction
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.cosine import CosineDecay

TIMES = 3
"""Ratio of scored examples to trained examples in steps with importance sampling."""
ALONE = 96
"""Number of examples for which per-example gradients are computed."""
NEAR, SEARCHES = 0.05, 6
"""Relative tolerance of the compute budget, and maximum number of runs to reach it."""


@dataclass(frozen=True)
class SelectionTask:
    """A model to train, with training data and held-out data."""

    objective: Objective
    source: BatchSource
    examples: int
    held_out: HeldOutExamples
    depth: int
    width: int
    length: int

    def build(self, seed: int) -> nn.Module:
        if isinstance(self.objective, NextToken):
            return llama(self.depth, self.width, self.length, seed)
        heads, side, labels = max(1, self.width // 16), 8, 10
        shape = ModelConfig(
            "vit", self.depth, self.width, heads, heads, 4 * self.width, labels, 0, tied=False, image=side, patch=2,
            channels=1,
        )  # fmt: skip
        return initialized(shape, seed)


def task_of(data: str, seed: int, depth: int, width: int, batch: int, length: int, windows: int) -> SelectionTask:
    """Return a task on digits, or on `windows` byte windows from the standard library's source files."""
    if data == "digits":
        dataset = open_images(DataSettings(source=data, batch=batch), seed, None, lambda text: None)
        return SelectionTask(
            Classification(), dataset.train, dataset.train.example_index().count, dataset.held_out, depth, width, 0
        )
    text, held_out = source_text()
    source = PackedTokens(text[: windows * length + 1], length, batch, seed)
    return SelectionTask(
        NextToken(), source, source.example_index().count, HeldOutWindows(held_out, length), depth, width, length
    )


def run_of(
    task: SelectionTask, source: BatchSource, techniques: Sequence[Technique], steps: int, lr: float, seed: int
) -> Run:
    """Return a training run of the task's model on the examples of `source`."""
    plain = BaseRun(partial(task.build, seed), source, task.objective)
    return compose(plain, [AdamW(lr=lr), CosineDecay(warmup=0.05), GradientClipping(), *techniques], steps)


@dataclass(frozen=True)
class FinishedRun:
    """A model at the end of its run. `work` is the run's compute in plain steps, which score no examples."""

    model: nn.Module
    steps: int
    work: float
    opened: float = 0.0
    tau: float = 0.0


def finished(
    task: SelectionTask, source: BatchSource, techniques: Sequence[Technique] = (), *, steps: int, lr: float, seed: int
) -> FinishedRun:
    with closing(in_steps(run_of(task, source, techniques, steps, lr, seed), seed)) as states:
        (_, model, _), *after_steps = states
    opened = [noted.get("sampled", 0.0) for _, _, noted in after_steps]
    taus = [noted.get("tau", 0.0) for _, _, noted in after_steps[-max(1, steps // 4) :]]
    return FinishedRun(model, steps, steps + sum(opened) * TIMES / 3, fmean(opened), fmean(taus))


def at_equal_compute(run: Callable[[int], FinishedRun], full: int) -> FinishedRun:
    """Search for the number of steps whose compute is `full` plain steps; return the run that is closest to this
    compute.
    """
    least = full * 3 // (3 + TIMES)
    runs = [run(full)]
    low, high = (least, float(least)), (full, runs[0].work)
    while abs(runs[-1].work - full) > NEAR * full and len(runs) < SEARCHES:
        along = (full - low[1]) / (high[1] - low[1])
        steps = min(max(round(low[0] + along * (high[0] - low[0])), low[0] + 1), high[0] - 1)
        runs.append(run(steps))
        if runs[-1].work < full:
            low = (steps, runs[-1].work)
        else:
            high = (steps, runs[-1].work)
    return min(runs, key=lambda done: abs(done.work - full))


@torch.no_grad()
def scores_of(model: nn.Module, objective: Objective, batches: Iterator[Batch]) -> Tensor:
    model.eval()
    prepared = map(objective.examples, batches)
    return torch.cat([objective.scores(objective.predict(model, batch), batch) for batch in prepared])


def gains(model: nn.Module, task: SelectionTask) -> dict[str, float]:
    """Return the claimed and the true factor by which score-proportional sampling reduces the gradient's second moment.

    The claimed factor is tau squared (Katharopoulos & Fleuret 2018). Both factors use the first training examples.
    """
    batch = task.objective.examples(task.source.rows(0, 0, min(ALONE, task.source.batch)))
    for step in range(1, -(-ALONE // task.source.batch)):
        more = task.objective.examples(task.source.at(step))
        fields = {name: torch.cat([batch[name], more[name]]) for name in batch.fields}
        batch = Batch(fields, torch.cat([batch.weight, more.weight]))
    scores, squares = scores_of(model, task.objective, iter([batch])), []
    for row in range(len(batch)):
        model.zero_grad()
        plain_backward(model, task.objective, batch.rows(row, row + 1).weighted(torch.ones(1)))
        squares.append(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    probability, exact = scores.double() / scores.double().sum(), torch.tensor(squares, dtype=torch.float64)
    uniform, sampled = exact.mean(), (exact / probability).sum() / len(probability) ** 2
    return {"claimed_gain": float(variance_reduction(scores)) ** 2, "true_gain": float(uniform / sampled)}
