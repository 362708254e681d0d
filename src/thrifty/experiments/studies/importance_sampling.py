"""Importance sampling and data pruning at equal FLOPs, with the cost of scoring included.

Papers    Katharopoulos & Fleuret 2018, Not All Samples Are Created Equal (arXiv 1803.00942). Paul, Ganguli & Dziugaite
          2021 (2107.07075): EL2N. The comparison follows Kaddour et al. 2023, No Train No Gain (2307.06440): equal
          compute, and a learning rate that decays until the end of each run.
Note      Compute is counted in forward passes of an example: 1 for a forward pass, 3 with the backward pass. The
          compute includes the scoring network before pruning, and scoring in steps with importance sampling. Sampling
          starts when its gate opens, that is, when the expected gain is large enough. The gate is unpredictable, so
          additional uncounted runs find the number of steps that meets the budget. Pruning keeps half of each class
          (`data_selection.prune`). If scores are gradient norms, sampling reduces the gradient's second moment by a
          factor of tau squared. The true reduction uses each example's gradient at the end of the uniform run.
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

VARIANTS = ("uniform", "sampled", "hardest half", "easiest half")
SCORED_AFTER, TESTED = 0.15, 497
"""Fraction of the steps after which the scoring network for pruning stops; number of held-out examples."""


def scores_before(task: SelectionTask, steps: int, lr: float, seed: int) -> Tensor:
    """Return the scores of all n examples (n,) from a separate network that was trained briefly."""
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
    """Train with the compute of `full_steps` plain steps, including scoring, and evaluate."""
    task = task_of(data, seed, depth, width, batch, length, windows)
    train_on = partial(finished, task, lr=lr, seed=seed)
    if way == "uniform":
        done = train_on(task.source, steps=full_steps)
    elif way == "sampled":
        done = at_equal_compute(
            lambda steps: train_on(task.source, [GradientNormSampling(presample=TIMES)], steps=steps), full_steps
        )
    else:
        scores = scores_before(task, full_steps, lr, seed)
        labels = task.source.example_index().labels
        kept = kept_examples(scores, labels, 0.5, "hard" if way == "hardest half" else "easy", 0.0, 0.5, seed)
        spent = scored_after(full_steps) + task.examples / (3 * batch)
        done = train_on(task.source.subset(ExampleSubset(kept)), steps=max(1, round(full_steps - spent)))
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
    """A small ViT on digits and a small byte model at equal compute, with four methods to choose examples.

    The methods are uniform sampling, gradient-norm sampling with a gate, the hardest half, and the easiest half.

    Command   thrifty study importance_sampling
    Expect    On digits, the gate opens. At the end, sampling would reduce the gradient's second moment by a factor of
              more than 2. On text, the gate never opens, because all windows are about equally hard. At equal compute,
              no method is better than uniform sampling on digits, because the cost of scoring is not recovered.
              Duration: eight minutes on two cores.
    """
    fixed = {"full_steps": full_steps, "depth": depth, "width": width, "batch": batch}
    own = {"digits": {"lr": 2e-3}, "text": {"lr": 3e-3, "length": length, "windows": windows}}
    cases = {
        label_of(way, data): {"way": way, "data": data, **fixed, **settings}
        for data, settings in own.items()
        for way in VARIANTS
    }

    def value(cells: Cells, way: str, data: str, name: str) -> float:
        return cells[label_of(way, data)][name]

    return Study(
        measure=measure,
        cases=cases,
        quantities={
            "loss": MeasuredQuantity("held-out loss, nats per prediction"),
            "accuracy": MeasuredQuantity("accuracy on the test images, as a fraction"),
            "steps": MeasuredQuantity("steps at equal FLOP"),
            "work": MeasuredQuantity("compute including scoring, relative to the full steps"),
            "opened": MeasuredQuantity("fraction of the steps with an open gate"),
            "tau": MeasuredQuantity("tau in the last quarter of the steps"),
            "claimed_gain": MeasuredQuantity("tau squared of the uniform run's last model"),
            "true_gain": MeasuredQuantity("true reduction of the second moment of that model's gradient"),
        },
        seeds=seeds,
        expect={
            "all variants have the same compute within 10 %": lambda c: all(
                abs(value(c, way, data, "work") - 1) < 0.1 for way in VARIANTS for data in own
            ),
            (
                "at the end of the uniform run, sampling would reduce the gradient's second moment by more than 2 on "
                "digits, and by less than 1.2 on text"
            ): lambda c: (
                value(c, "uniform", "digits", "true_gain") > 2 and value(c, "uniform", "text", "true_gain") < 1.2
            ),
            "the gate opens on digits, and never on text": lambda c: (
                value(c, "sampled", "digits", "opened") > 0 == value(c, "sampled", "text", "opened")
            ),
            "at equal compute, no variant has a lower loss on digits than uniform sampling": lambda c: all(
                value(c, way, "digits", "loss") > value(c, "uniform", "digits", "loss") for way in VARIANTS[1:]
            ),
            "at equal compute on text, uniform is best, and the hardest half beats the easiest": lambda c: (
                value(c, "easiest half", "text", "loss")
                > value(c, "hardest half", "text", "loss")
                > value(c, "uniform", "text", "loss")
            ),
        },
        plots=[StudyPlot("loss", "Held-out loss at equal compute", y="loss")],
        minutes=8,
    )
