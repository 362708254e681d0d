"""Small models trained on examples that somebody chose, for studies of what choosing is worth: a task, a run of it, and
how many steps a run may have when it is paid for looking at examples too.

Work is counted in plain steps, in which an example costs 3 forward passes: its own, and twice that for the backward
pass.
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
"""How many times more examples are scored than trained on, while the gate of sampling is open."""
ALONE = 96
"""Examples whose own gradients are looked at."""
NEAR, SEARCHES = 0.05, 6
"""How close to the work that is paid for the steps are to come, and runs to find out how many they are."""


@dataclass(frozen=True)
class SelectionTask:
    """A model to train, on what, and by what it is judged."""

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
    """Digits, or so many windows of the source code of the running standard library as bytes."""
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
    """A model's training on what was chosen."""
    plain = BaseRun(partial(task.build, seed), source, task.objective)
    return compose(plain, [AdamW(lr=lr), CosineDecay(warmup=0.05), GradientClipping(), *techniques], steps)


@dataclass(frozen=True)
class FinishedRun:
    """A model at the end of its run; work in plain steps."""

    model: nn.Module
    steps: int
    work: float
    opened: float = 0.0
    tau: float = 0.0


def finished(
    task: SelectionTask, source: BatchSource, techniques: Sequence[Technique] = (), *, steps: int, lr: float, seed: int
) -> FinishedRun:
    with closing(in_steps(run_of(task, source, techniques, steps, lr, seed), seed)) as states:
        (_, model, _), *made = states
    opened = [noted.get("sampled", 0.0) for _, _, noted in made]
    taus = [noted.get("tau", 0.0) for _, _, noted in made[-max(1, steps // 4) :]]
    return FinishedRun(model, steps, steps + sum(opened) * TIMES / 3, fmean(opened), fmean(taus))


def at_full_work(run: Callable[[int], FinishedRun], full: int) -> FinishedRun:
    """The run of so many steps that its work is nearest to that of `full` plain ones."""
    least = full * 3 // (3 + TIMES)
    tried = [run(full)]
    low, high = (least, float(least)), (full, tried[0].work)
    while abs(tried[-1].work - full) > NEAR * full and len(tried) < SEARCHES:
        along = (full - low[1]) / (high[1] - low[1])
        steps = min(max(round(low[0] + along * (high[0] - low[0])), low[0] + 1), high[0] - 1)
        tried.append(run(steps))
        if tried[-1].work < full:
            low = (steps, tried[-1].work)
        else:
            high = (steps, tried[-1].work)
    return min(tried, key=lambda done: abs(done.work - full))


@torch.no_grad()
def scores_of(model: nn.Module, objective: Objective, batches: Iterator[Batch]) -> Tensor:
    model.eval()
    made = map(objective.examples, batches)
    return torch.cat([objective.scores(objective.predict(model, batch), batch) for batch in made])


def gains(model: nn.Module, task: SelectionTask) -> dict[str, float]:
    """By what sampling in proportion to scores divides the second moment of the gradient: as tau squared says, and in
    truth, both of the first of the examples that it was trained on."""
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
    share, exact = scores.double() / scores.double().sum(), torch.tensor(squares, dtype=torch.float64)
    uniform, sampled = exact.mean(), (exact / share).sum() / len(share) ** 2
    return {"claimed_gain": float(variance_reduction(scores)) ** 2, "true_gain": float(uniform / sampled)}
