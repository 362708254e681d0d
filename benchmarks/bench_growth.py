"""Wall-clock time to equal loss: a growing model against the full model, each with its rate decayed to its own end.

The full model is trained for several budgets, which yields a curve of loss against seconds. The final loss of a growing
run is looked up on it. A ratio above 1 means that the full model takes longer; null in the file means that it never
gets there. The runs of a seed have a random order, so that a drift of the machine affects all. Promise: none; "no
faster" is a valid result. Run it on a quiet machine with one thread per core.
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
"""Budgets of the full model, relative to a growing run."""
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
    """Ratio of the full model's time to the growing run's; infinite if the full model never reaches the loss."""

    def as_data(self) -> dict[str, float | None]:
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def run(techniques: Sequence[Technique], steps: int, seed: int) -> tuple[float, float]:
    """Return the seconds in steps and the held-out loss."""
    trained = train_on_bytes(
        lambda: llama(DEPTH, WIDTH, LENGTH, seed),
        [AdamW(lr=RATE), CosineDecay(warmup=0.05), GradientClipping(), *techniques],
        steps=steps,
        seed=seed,
        length=LENGTH,
        batch=BATCH,
    )
    return trained.seconds, trained.held_out_loss(1024)


def seconds_to(loss: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return the time at which a curve of (seconds, loss) reaches a loss, linear in log seconds between its points.

    Return infinity if it never does, and the first time if it begins below.
    """
    if loss >= curve[0][1]:
        return curve[0][0]
    for (earlier, above), (later, below) in pairwise(curve):
        if below <= loss <= above:
            share = (above - loss) / (above - below) if above > below else 1.0
            return math.exp(math.log(earlier) + share * math.log(later / earlier))
    return math.inf


def run_shuffled(steps: int, seed: int) -> tuple[list[tuple[float, float]], dict[str, tuple[float, float]]]:
    """Return the full model's curve by rising budget, and the result of each growing variant, as (seconds, loss)."""
    jobs = [*CURVE, *WAYS]
    random.Random(seed).shuffle(jobs)
    results = {
        job: run(WAYS[job], steps, seed) if isinstance(job, str) else run([], round(job * steps), seed) for job in jobs
    }
    return [results[share] for share in CURVE], {name: results[name] for name in WAYS}


def main() -> None:
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    seeds = range(int(sys.argv[3]) if len(sys.argv) > 3 else 3)
    curves: list[list[tuple[float, float]]] = []
    grown: dict[str, list[Grown]] = {name: [] for name in WAYS}
    for seed in seeds:
        curve, ends = run_shuffled(steps, seed)
        curves.append(curve)
        print(f"seed {seed}, full:", ", ".join(f"{loss:.3f} in {seconds:.0f} s" for seconds, loss in curve))
        for name, (seconds, loss) in ends.items():
            ratio = seconds_to(loss, curve) / seconds
            grown[name].append(Grown(seconds, loss, ratio))
            print(f"  {name:<26} {loss:.3f} in {seconds:6.1f} s; the full model takes {ratio:.2f} times as long")
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
