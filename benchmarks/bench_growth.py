"""Wall-clock to equal loss: a model that grows against the full model, each with a rate that is decayed to its own end.

The full model is trained for several budgets, which gives a curve of loss against seconds; the loss that a growing run
ends at is looked up on it. Above 1, the full model takes longer to get there; null in the file where it never does. The
runs of a seed come in an order drawn from it, so that a machine's drift meets all of them. Promise: none; this is a
measurement, and "no faster" is an answer. On a quiet machine, with one thread for each core.
"""

import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from side_by_side import write
from thrifty.core.technique import Technique
from thrifty.experiments.tasks.language_task import llama, train_on_bytes
from thrifty.techniques.curriculum.sequence_length import SequenceLengthWarmup
from thrifty.techniques.gradients.clip import GradientClipping
from thrifty.techniques.growth.auto_grow import AutoGrow
from thrifty.techniques.growth.compound import CompoundGrowth
from thrifty.techniques.growth.layer_drop import LayerDrop
from thrifty.techniques.growth.stacking import ProgressiveStacking
from thrifty.techniques.optimizers.adamw import AdamW
from thrifty.techniques.schedules.cosine import CosineDecay

DEPTH, WIDTH, LENGTH, BATCH, RATE = 8, 128, 64, 16, 2e-3
STEPS = 400
CURVE = (0.5, 0.75, 1.0, 1.5, 2.0)
"""Budgets of the full model, in growing runs."""
WAYS: Mapping[str, Sequence[Technique]] = {
    "stacking": [ProgressiveStacking()],
    "stacking, silent copies": [ProgressiveStacking(start="zeroed")],
    "compound": [CompoundGrowth()],
    "compound, pooled": [CompoundGrowth(shorten="pool")],
    "automatic": [AutoGrow(search=0.05)],
    "shorter texts first": [SequenceLengthWarmup(start=16)],
    "dropped blocks": [LayerDrop()],
}


@dataclass(frozen=True)
class Grown:
    seconds: float
    loss: float
    full_over_grown: float
    """Infinite where the full model never gets as low."""

    def as_data(self) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def run(ways: Sequence[Technique], steps: int, seed: int) -> tuple[float, float]:
    """Seconds in steps, and the held-out loss."""
    trained = train_on_bytes(
        lambda: llama(DEPTH, WIDTH, LENGTH, seed),
        [AdamW(lr=RATE), CosineDecay(warmup=0.05), GradientClipping(), *ways],
        steps=steps,
        seed=seed,
        length=LENGTH,
        batch=BATCH,
    )
    return trained.seconds, trained.held_out_loss(1024)


def seconds_to(loss: float, curve: Sequence[tuple[float, float]]) -> float:
    """When a curve of (seconds, loss) reaches a loss, straight between its points in the logarithm of seconds; infinite
    where it does not get there, the first of it where it begins below."""
    if loss >= curve[0][1]:
        return curve[0][0]
    for (earlier, above), (later, below) in pairwise(curve):
        if below <= loss <= above:
            share = (above - loss) / (above - below) if above > below else 1.0
            return math.exp(math.log(earlier) + share * math.log(later / earlier))
    return math.inf


def in_turn(steps: int, seed: int) -> tuple[list[tuple[float, float]], dict[str, tuple[float, float]]]:
    """The full model's curve, its budgets rising, and what each way of growing came to, as (seconds, loss)."""
    jobs = [*CURVE, *WAYS]
    random.Random(seed).shuffle(jobs)
    found = {
        job: run(WAYS[job], steps, seed) if isinstance(job, str) else run([], round(job * steps), seed) for job in jobs
    }
    return [found[share] for share in CURVE], {name: found[name] for name in WAYS}


def main() -> None:
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    seeds = range(int(sys.argv[3]) if len(sys.argv) > 3 else 3)
    curves: list[list[tuple[float, float]]] = []
    grown: dict[str, list[Grown]] = {name: [] for name in WAYS}
    for seed in seeds:
        curve, ends = in_turn(steps, seed)
        curves.append(curve)
        print(f"seed {seed}, full:", ", ".join(f"{loss:.3f} in {seconds:.0f} s" for seconds, loss in curve))
        for name, (seconds, loss) in ends.items():
            ratio = seconds_to(loss, curve) / seconds
            grown[name].append(Grown(seconds, loss, ratio))
            print(f"  {name:<26} {loss:.3f} in {seconds:6.1f} s; the full model takes {ratio:.2f} of that")
    print()
    for name, each in grown.items():
        ratios = [one.full_over_grown for one in each]
        print(f"{name:<28} median {median(ratios):.2f}  [{min(ratios):.2f}, {max(ratios):.2f}]")
    if len(sys.argv) > 1:
        write(
            Path(sys.argv[1]) / "growth.json",
            {
                "benchmark": "growth",
                "steps": steps,
                "shares": CURVE,
                "curves": curves,
                "runs": {name: [one.as_data() for one in each] for name, each in grown.items()},
            },
        )


if __name__ == "__main__":
    main()
