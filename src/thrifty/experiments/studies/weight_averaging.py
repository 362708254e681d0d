"""Weight averaging: at a constant learning rate, the mean of the latest weights is far better than the last weights.
After learning-rate decay, the mean is not better.

Paper     Kaddour 2022, Stop Wasting My Time! (arXiv 2209.14981); Sanyal et al. 2023 (arXiv 2306.03241).
Note      Each case stops at one step of a run that is planned for `steps` steps. It then evaluates the raw weights and
          both means. Runs with equal schedule and seed are identical until that step.
"""

from typing import Literal

import torch

from thrifty.composition.compose import CPU, BaseRun, compose
from thrifty.core.gradient_transform import GradientTransform
from thrifty.core.technique import Technique
from thrifty.data.text.token_windows import HeldOutWindows, PackedTokens
from thrifty.experiments.study import Cells, MeasuredQuantity, Study, StudyPlot, grid
from thrifty.experiments.tasks.language_task import llama, source_text
from thrifty.objectives.next_token import NextToken
from thrifty.optim.weight_average import EmaTransform
from thrifty.techniques.averaging.latest import LatestWeightsTransform
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.constant_then_decay import ConstantThenDecay
from thrifty.techniques.schedules.cosine import CosineDecay
from thrifty.training.evaluation import held_out_loss
from thrifty.training.loop import train

Schedule = Literal["constant", "cosine"]


def schedule_of(name: Schedule, warmup: int, steps: int) -> Technique:
    """Return the schedule of a run of `steps` steps. It does not depend on the evaluation step."""
    if name == "cosine":
        return CosineDecay(warmup=warmup, until=steps)
    return ConstantThenDecay(warmup=warmup, decay_from=steps, until=steps)


def measure(
    seed: int,
    schedule: Schedule,
    at: int,
    steps: int,
    lr: float,
    copies: int,
    every: int,
    decay: float,
    depth: int,
    width: int,
    length: int,
    batch: int,
) -> dict[str, float]:
    """Return held-out losses after `at` steps, for the raw weights and for the two running means."""
    source = PackedTokens(source_text()[0], length, batch, seed)
    plain = BaseRun(lambda: llama(depth, width, length, seed), source, NextToken())
    techniques = [AdamW(lr=lr), GradientClipping(), schedule_of(schedule, steps // 50, steps)]
    run = compose(plain, techniques, at)
    state = run.start()
    model, optimizer = state.model, state.optimizer
    assert model is not None and optimizer is not None
    means: dict[str, GradientTransform] = {
        "lawa": LatestWeightsTransform(copies, start=every, every=every),
        "ema": EmaTransform(decay),
    }
    slots = {name: mean.init(optimizer.names, optimizer.parameters) for name, mean in means.items()}
    for record in train(run, state, seed):
        for name, mean in means.items():
            before = record.step - 1
            mean.after_step(slots[name], optimizer.parameters, mean.scalars(before, before))

    def loss() -> float:
        held_out = HeldOutWindows(source_text()[1], length)
        return held_out_loss(model, run.eval_objective, held_out.batches(1024, 64), CPU)

    numbers = {"loss": loss(), "seconds": state.counters["seconds"]}
    for name, mean in means.items():
        values = mean.eval_weights(slots[name], optimizer.parameters, mean.scalars(at, at)) or optimizer.parameters
        with torch.no_grad():
            for parameter, value in zip(optimizer.parameters, values, strict=True):
                parameter.copy_(value)
        numbers[f"{name}_loss"] = loss()
        numbers[f"{name}_gain"] = numbers["loss"] - numbers[f"{name}_loss"]
    return numbers


def weight_averaging(
    seeds: int = 3,
    moments: tuple[int, ...] = (300, 600, 1200, 1800, 2400),
    lr: float = 3e-3,
    copies: int = 6,
    every: int = 50,
    decay: float = 0.99,
    depth: int = 3,
    width: int = 64,
    length: int = 64,
    batch: int = 16,
) -> Study:
    """A 3-block byte model trained for 2400 steps with a constant or a cosine learning rate, evaluated at five steps.

    The evaluated weights are the raw weights, the mean of the latest six copies (LAWA), and an exponential moving
    average (EMA).

    Command   thrifty study weight_averaging
    Expect    Early in the run, LAWA is worse than the raw weights, because its copies are outdated. With the constant
              learning rate, both means gain almost 0.1 nats in the second half of the run. At the end, they gain about
              as much as learning-rate decay. With the decayed learning rate, the gain vanishes toward the end of the
              run. Duration: twelve minutes on two cores.
    """
    fixed = {
        "steps": moments[-1], "lr": lr, "copies": copies, "every": every, "decay": decay, "depth": depth,
        "width": width, "length": length, "batch": batch,
    }  # fmt: skip
    levels = grid(schedule=("constant", "cosine"), at=moments)
    early, middle, end = moments[0], moments[len(moments) // 2], moments[-1]

    def value(cells: Cells, schedule: Schedule, at: int, name: str) -> float:
        return cells[f"schedule {schedule}, at {at}"][name]

    def gains(cells: Cells, schedule: Schedule, at: int) -> list[float]:
        return [value(cells, schedule, at, name) for name in ("lawa_gain", "ema_gain")]

    return Study(
        measure=measure,
        cases={label: {**level, **fixed} for label, level in levels.items()},
        quantities={
            "loss": MeasuredQuantity("held-out loss of the weights after these steps, nats per byte"),
            "lawa_loss": MeasuredQuantity(
                f"held-out loss of the mean of the latest {copies} copies, {every} steps apart"
            ),
            "ema_loss": MeasuredQuantity(f"held-out loss of the exponential average with a decay of {decay:g}"),
            "lawa_gain": MeasuredQuantity("loss of the weights minus loss of the mean of the copies, in the same run"),
            "ema_gain": MeasuredQuantity("loss of the weights minus loss of the exponential average, in the same run"),
            "seconds": MeasuredQuantity("seconds in training steps, one thread", of_machine=True),
        },
        seeds=seeds,
        expect={
            "early, the mean of the copies is worse than the weights, at both rates": lambda c: (
                max(value(c, name, early, "lawa_gain") for name in ("constant", "cosine")) < 0
            ),
            "at the constant rate, both means gain more than 0.03 in the middle and at the end": lambda c: (
                min(gains(c, "constant", middle) + gains(c, "constant", end)) > 0.03
            ),
            "at the decayed rate, both means differ from the weights by less than 0.01 at the end": lambda c: (
                max(abs(gain) for gain in gains(c, "cosine", end)) < 0.01
            ),
            (
                "at the constant rate, the mean of the copies before the last stretch beats the final weights"
            ): lambda c: value(c, "constant", moments[-2], "lawa_loss") < value(c, "constant", end, "loss"),
            "at the end, that mean is within 0.02 of the weights at the decayed rate": lambda c: (
                value(c, "constant", end, "lawa_loss") < value(c, "cosine", end, "loss") + 0.02
            ),
        },
        plots=[
            StudyPlot("lawa_gain", "Gain of the latest copies' mean, nats", x="at", y="lawa_gain", by="schedule"),
            StudyPlot("ema_gain", "Gain of the exponential average, nats", x="at", y="ema_gain", by="schedule"),
            StudyPlot("loss", "Held-out loss of the weights", x="at", y="loss", by="schedule"),
            StudyPlot("lawa_loss", "Held-out loss of the latest copies' mean", x="at", y="lawa_loss", by="schedule"),
        ],
        minutes=12,
    )
