"""Interleaved timing of several variants of the same work in one process, so that machine drift affects all equally."""

import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from thrifty.training.run_environment import environment


@dataclass(frozen=True)
class Timing:
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.seconds), max(self.seconds)


def side_by_side(
    variants: Mapping[str, Callable[[], object]],
    rounds: int = 10,
    warmup: int = 2,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Timing]:
    """Time each variant once per round, in rotating order; the first `warmup` rounds are discarded.

    The functions in `before` run untimed before each call of their variant.
    """
    names = list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(warmup + rounds):
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            if before is not None:
                before[name]()
            began = time.perf_counter()
            variants[name]()
            if torch.cuda.is_initialized():  # GPU kernels finish asynchronously
                torch.cuda.synchronize()
            if round_number >= warmup:
                seconds[name].append(time.perf_counter() - began)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def ratio(timings: Mapping[str, Timing], name: str, baseline: str) -> float:
    """Return the median over rounds of a variant's time divided by the baseline's in the same round."""
    pairs = zip(timings[name].seconds, timings[baseline].seconds, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def print_timings(title: str, timings: Mapping[str, Timing], baseline: str, work: float = 0.0, unit: str = "") -> None:
    """Print a table of median, range and ratio to the baseline; `work` per call adds a rate in units per second."""
    print(f"\n{title}  (torch {torch.__version__}, {torch.get_num_threads()} threads)")
    for name, timing in timings.items():
        low, high = timing.spread
        rate = f"  {work / timing.median:12,.0f} {unit}" if work else ""
        print(
            f"  {name:<34} {timing.median * 1e3:9.1f} ms  [{low * 1e3:.1f}, {high * 1e3:.1f}]"
            f"  {ratio(timings, name, baseline):6.3f} of {baseline}{rate}"
        )


def save_timings(path: Path, facts: Mapping[str, object], timings: Mapping[str, Timing], baseline: str) -> None:
    """Write timings as JSON for results/, with the machine, the versions and the command."""
    write(path, {**facts, "seconds": rows(timings, baseline), "baseline": baseline})


def rows(timings: Mapping[str, Timing], baseline: str) -> dict[str, dict[str, object]]:
    return {
        name: {"median": timing.median, "spread": timing.spread, "ratio": ratio(timings, name, baseline)}
        for name, timing in timings.items()
    }


def write(path: Path, facts: Mapping[str, object]) -> None:
    """Write results as JSON with the machine, the versions and the command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts_of_machine = environment("cuda" if torch.cuda.is_available() else "cpu")
    names = ("cpu", "gpu", "cores", "device", "torch", "python", "started")
    machine = {name: facts_of_machine[name] for name in names if name in facts_of_machine}
    openmp = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))}
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    path.write_text(json.dumps({**facts, **machine, "openmp": openmp, "command": command}, indent=1))
