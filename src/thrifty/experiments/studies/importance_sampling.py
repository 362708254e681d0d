"""What choosing examples is worth when choosing is paid for: importance sampling and pruning at equal work.

Papers    Katharopoulos & Fleuret 2018, Not All Samples Are Created Equal (arXiv 1803.00942); Paul, Ganguli & Dziugaite
          2021 (2107.07075), EL2N; judged as Kaddour et al. 2023, No Train No Gain (2307.06440) ask for: at equal work,
          with a rate that is decayed to its end.
Note      work is counted in examples: 1 for a forward pass, 3 with the backward pass. Scoring counts: the network that
          scores before pruning, and what an open gate looks at. How often the gate will be open is not known before a
          run, and its rate has to be decayed to the end: runs that are not counted find the number of steps. Pruning
          keeps half of an equal part of each class (`data_selection.prune`). Sampling divides the second moment of the
          gradient by tau squared if scores are the norms of the gradients; by what in truth, is computed from each
          example's own gradient at the end of the uniform run.
"""

from contextlib import closing
from dataclasses import replace
from functools import partial

from torch import Tensor

from thrifty.composition.compose import CPU
from thrifty.core.batches import ExampleSubset
from thrifty.core.randomness import seed_of
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot
from thrifty.experiments.tasks.data_selection_task import (
    TIMES,
    SelectionTask,
    at_equal_compute,
    finished,
    gains,
    run_of,
    scores_of,
    task_of,
)
from thrifty.experiments.tasks.whole_run import in_steps
from thrifty.techniques.data_selection.gradient_norm_sampling import GradientNormSampling
from thrifty.techniques.data_selection.prune import kept_examples
from thrifty.training.evaluation import evaluate

WAYS = ("uniform", "sampled", "hardest half", "easiest half")
SCORED_AFTER, TESTED = 0.15, 497
"""When the network that scores for pruning stops, as a share of the run; held-out examples."""


def scores_before(task: SelectionTask, steps: int, lr: float, seed: int) -> Tensor:
    """The score of each example (n,) by another network that was trained for a moment."""
    own_seed = seed_of(f"importance sampling/{seed}")
    with closing(in_steps(run_of(task, task.source, [], steps, lr, own_seed), own_seed)) as states:
        model = next(model for step, model, _ in states if step == scored_after(steps))
    return scores_of(model, task.objective, task.source.sequential_batches(64))  # type: ignore[attr-defined]


def scored_after(steps: int) -> int:
    return round(SCORED_AFTER * steps)


def measure(
    seed: int,
    way: str,
    data: str,
    full_steps: int,
    depth: int,
    width: int,
    batch: int,
    lr: float,
    length: int = 0,
    windows: int = 0,
) -> dict[str, float]:
    """A model after the work of `full_steps` plain steps, scoring included."""
    task = task_of(data, seed, depth, width, batch, length, windows)
    go = partial(finished, task, lr=lr, seed=seed)
    if way == "uniform":
        done = go(task.source, steps=full_steps)
    elif way == "sampled":
        done = at_equal_compute(
            lambda steps: go(task.source, [GradientNormSampling(presample=TIMES)], steps=steps), full_steps
        )
    else:
        scores = scores_before(task, full_steps, lr, seed)
        labels = task.source.example_index().labels
        kept = kept_examples(scores, labels, 0.5, "hard" if way == "hardest half" else "easy", 0.0, 0.5, seed)
        spent = scored_after(full_steps) + task.examples / (3 * batch)
        done = go(task.source.subset(ExampleSubset(kept)), steps=max(1, round(full_steps - spent)))
        done = replace(done, work=done.work + spent)
    batches = task.held_out.batches(TESTED, 64)
    metrics = evaluate(done.model, task.objective, map(task.objective.examples, batches), CPU)
    numbers = {**metrics, "steps": done.steps, "work": done.work / full_steps}
    if way == "sampled":
        numbers |= {"opened": done.opened, "tau": done.tau}
    return numbers | (gains(done.model, task) if way == "uniform" else {})


def label_of(way: str, data: str) -> str:
    return f"{way}, {data}"


def importance_sampling(
    seeds: int = 5,
    full_steps: int = 600,
    depth: int = 2,
    width: int = 48,
    batch: int = 32,
    length: int = 64,
    windows: int = 4096,
) -> Study:
    """A small ViT on digits and a small language model of bytes at equal work: uniform examples, sampled by their
    gradients' norms while that pays, and the hardest and the easiest half.

    Command   thrifty study importance_sampling
    Expect    on digits sampling would divide the second moment of the gradient by more than 2 at the end, and the gate
              opens on the way there; on text it never does, since windows are all about as hard. At equal work nothing
              beats uniform examples on digits: what scoring costs is not earned back. Eight minutes on two cores.
    """
    fixed = {"full_steps": full_steps, "depth": depth, "width": width, "batch": batch}
    own = {"digits": {"lr": 2e-3}, "text": {"lr": 3e-3, "length": length, "windows": windows}}
    cases = {
        label_of(way, data): {"way": way, "data": data, **fixed, **settings}
        for data, settings in own.items()
        for way in WAYS
    }

    def value(cells: Cells, way: str, data: str, name: str) -> float:
        return cells[label_of(way, data)][name]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "loss": MeasuredQuantity("held-out loss, nats per prediction"),
            "accuracy": MeasuredQuantity("share of the test images told right"),
            "steps": MeasuredQuantity("steps that the work paid for"),
            "work": MeasuredQuantity("work done, as a share of the full steps' work; scoring included"),
            "opened": MeasuredQuantity("share of the steps in which the gate was open"),
            "tau": MeasuredQuantity("tau in the last quarter of the steps"),
            "claimed_gain": MeasuredQuantity("tau squared of the uniform run's last model"),
            "true_gain": MeasuredQuantity("by what sampling divides the second moment of that model's gradient"),
        },
        seeds=seeds,
        expect={
            "all do the same work, within a tenth": lambda c: all(
                abs(value(c, way, data, "work") - 1) < 0.1 for way in WAYS for data in own
            ),
            (
                "at the end of the uniform run sampling would divide the gradient's second moment by more than 2 on "
                "digits, and by less than 1.2 on text"
            ): lambda c: (
                value(c, "uniform", "digits", "true_gain") > 2 and value(c, "uniform", "text", "true_gain") < 1.2
            ),
            "the gate opens on digits and never on text": lambda c: (
                value(c, "sampled", "digits", "opened") > 0 == value(c, "sampled", "text", "opened")
            ),
            "at equal work nothing has a lower loss on digits than uniform examples": lambda c: all(
                value(c, way, "digits", "loss") > value(c, "uniform", "digits", "loss") for way in WAYS[1:]
            ),
            "at equal work half of the windows of text is worse than all of them, the easiest half most": lambda c: (
                value(c, "easiest half", "text", "loss")
                > value(c, "hardest half", "text", "loss")
                > value(c, "uniform", "text", "loss")
            ),
        },
        plots=[StudyPlot("loss", "Held-out loss at equal work", y="loss")],
        minutes=8,
    )
