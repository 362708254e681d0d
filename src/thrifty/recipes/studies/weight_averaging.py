"""Weight averaging: at a constant rate the mean of the latest weights is far better than the last ones; once the rate
has been decayed it is not.

Paper     Kaddour 2022, Stop Wasting My Time! (arXiv 2209.14981); Sanyal et al. 2023 (arXiv 2306.03241).
Note      a case trains up to one moment of a run that is planned for `steps`, so that raw weights and both means are
          judged there; the runs of one schedule and seed are the same as far as they go.
"""

from typing import Literal

import torch

from thrifty.core.compose import CPU, Plain, compose
from thrifty.core.technique import Technique
from thrifty.core.transforms import Transform
from thrifty.data.packing import HeldOut, PackedTokens
from thrifty.objectives.next_token import NextToken
from thrifty.studies.language import llama, source_text
from thrifty.studies.study import Cells, Expectation, Plot, Quantity, Study, grid
from thrifty.techniques.large_batch.exponential_average import KeepAverage
from thrifty.techniques.large_batch.latest_weight_average import KeepLatest
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.optimizers.clip import Clip
from thrifty.techniques.schedules.constant_then_decay import ConstantThenDecay
from thrifty.techniques.schedules.cosine import Cosine
from thrifty.training.evaluate import held_out_loss
from thrifty.training.loop import train

Schedule = Literal["constant", "cosine"]


def schedule_of(name: Schedule, warmup: int, steps: int) -> Technique:
    """For a run planned for `steps`, however early it is looked at."""
    if name == "cosine":
        return Cosine(warmup=warmup, until=steps)
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
    """Held-out losses after `at` steps: of the weights themselves, and of the two means that were kept beside them."""
    source = PackedTokens(source_text()[0], length, batch, seed)
    plain = Plain(lambda: llama(depth, width, length, seed), source, NextToken())
    techniques = [AdamW(lr=lr), Clip(), schedule_of(schedule, steps // 50, steps)]
    run = compose(plain, techniques, at)
    state = run.start()
    model, optimizer = state.model, state.optimizer
    assert model is not None and optimizer is not None
    means: dict[str, Transform] = {"lawa": KeepLatest(copies, start=every, every=every), "ema": KeepAverage(decay)}
    slots = {name: mean.init(optimizer.names, optimizer.parameters) for name, mean in means.items()}
    for record in train(run, state, seed):
        for name, mean in means.items():
            before = record.step - 1
            mean.follow(slots[name], optimizer.parameters, mean.numbers(before, before))

    def loss() -> float:
        held_out = HeldOut(source_text()[1], length)
        return held_out_loss(model, run.judged_by, held_out.batches(1024, 64), CPU)

    numbers = {"loss": loss(), "seconds": state.counters["seconds"]}
    for name, mean in means.items():
        values = mean.judged(slots[name], optimizer.parameters, mean.numbers(at, at)) or optimizer.parameters
        with torch.no_grad():
            for parameter, value in zip(optimizer.parameters, values, strict=True):
                parameter.copy_(value)
        numbers[f"{name}_loss"] = loss()
        numbers[f"{name}_gain"] = numbers["loss"] - numbers[f"{name}_loss"]
    return numbers
