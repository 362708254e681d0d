"""Training loop against a hand-written PyTorch loop with the same work, in alternating steps.

Promise: step time at most 1.03 times that of the plain loop. Both use the same model, data, loss and optimizer. The
difference is the loop's overhead: records, seeds, checks for non-finite values, extension points.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.composition.compose import BaseRun, compose
from thrifty.core.batches import BatchSource
from thrifty.core.recipe import DataSettings, ModelSettings
from thrifty.data.text.text_data import open_text
from thrifty.models import build_model
from thrifty.objectives import find_objective
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.training.loop import train

STEPS = 100_000


def plain_loop(plain: BaseRun) -> Iterator[float]:
    model, objective, source = plain.build(), plain.objective, plain.source
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(STEPS):
        batch = source.at(step)
        losses = objective.losses(objective.predict(model, batch), batch)
        loss = (losses * batch.weight).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item() + norm.item()


def main() -> None:
    settings = DataSettings("python-stdlib", length=256, batch=8, vocabulary=4096)
    data = open_text(settings, seed=0)
    source: BatchSource = data.train
    for preset in ("llama-nano", "llama-micro", "llama-mini"):
        plain = BaseRun(
            lambda preset=preset: build_model(ModelSettings(preset=preset), data.vocabulary, settings.length, 0),
            source,
            find_objective("next_token"),
        )
        run = compose(plain, [AdamW(lr=1e-3)], STEPS)
        ours, theirs = train(run, run.start(), seed=0), plain_loop(plain)
        timings = side_by_side({"plain loop": lambda: next(theirs), "thrifty": lambda: next(ours)}, 40, 5)  # noqa: B023
        print_timings(f"one step of {preset}, 8 x 256 tokens", timings, "plain loop", 8 * 256, "tokens/s")
        if len(sys.argv) > 1:
            save_timings(
                Path(sys.argv[1]) / f"loop-{preset}.json",
                {"benchmark": "loop", "preset": preset},
                timings,
                "plain loop",
            )


if __name__ == "__main__":
    main()
