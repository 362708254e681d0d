"""CPU steps that keep freed memory, against steps that return it to the kernel as glibc does by default.

    python benchmarks/bench_freed_memory.py [--rounds 5] [--json results/benchmarks/freed-memory-cpu.json]

Runs keep it (`training/memory_meter.py`). Promise: a step takes no longer, and the peak of the process is at most a
tenth higher. glibc's dynamic thresholds cannot be restored once set, so each variant has its own processes, in
alternating order.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch

from bench_waiting import training_step
from side_by_side import Timing, print_timings, rows, write
from thrifty.training.memory_meter import MemoryMeter, keep_freed_memory

CPU = torch.device("cpu")
STEPS = {
    "llama-nano, 8 x 256 tokens": ("llama-nano", 8, 256, 12),
    "llama-micro, 32 x 256 tokens": ("llama-micro", 32, 256, 5),
    "llama-mini, 8 x 512 tokens": ("llama-mini", 8, 512, 4),
}
"""Name -> preset, examples, tokens of each, and number of timed steps in one process."""
WAYS = ("given back", "kept")


def measured(name: str, way: str) -> dict[str, float]:
    """Return the median time of a step in this process, its page faults, and the peak memory."""
    preset, batch, length, times = STEPS[name]
    allocator: AbstractContextManager[None] = keep_freed_memory(CPU) if way == "kept" else nullcontext()
    meter, seconds = MemoryMeter(CPU), []
    with allocator:
        step = training_step(preset, batch, length)
        for _ in range(2):
            step()
        faults = getrusage(RUSAGE_SELF).ru_minflt
        for _ in range(times):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        faults = getrusage(RUSAGE_SELF).ru_minflt - faults
        return {"seconds": statistics.median(seconds), "faults": faults / times, "peak": meter.peak()}


def alternate(name: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for round_number in range(rounds):
        for way in WAYS if round_number % 2 else WAYS[::-1]:
            command = [sys.executable, __file__, "--one", name, way]
            results[way].append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one)))
        return
    cases = {}
    for name in STEPS:
        results = alternate(name, options.rounds)
        timings = {way: Timing(tuple(each["seconds"] for each in results[way])) for way in WAYS}
        faults, peaks = (
            {way: statistics.median(each[key] for each in results[way]) for way in WAYS} for key in ("faults", "peak")
        )
        print_timings(name, timings, "given back")
        for way in WAYS:
            print(f"  {way:<34} {faults[way]:9,.0f} page faults per step, peak {peaks[way] / 1e6:,.0f} MB")
        cases[name] = {"seconds": rows(timings, "given back"), "faults": faults, "peaks": peaks}
    if options.json:
        write(options.json, {"benchmark": "freed memory", "baseline": "given back", "cases": cases})


if __name__ == "__main__":
    main()
