"""Steps on a processor that keep the memory they free, against steps that give it back as glibc does by itself.

    python benchmarks/bench_freed_memory.py [--rounds 5] [--json results/benchmarks/freed-memory-cpu.json]

Runs keep it (`training/memory_meter.py`). Promise: a step takes no longer, and the process holds at most a tenth more
at its
peak. glibc's own limits move and cannot be brought back once they are set, so each way has processes of its own; they
take turns.
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
from side_by_side import Timing, rows, tell, write
from thrifty.training.memory_meter import MemoryMeter, keep_freed_memory

CPU = torch.device("cpu")
STEPS = {
    "llama-nano, 8 x 256 tokens": ("llama-nano", 8, 256, 12),
    "llama-micro, 32 x 256 tokens": ("llama-micro", 32, 256, 5),
    "llama-mini, 8 x 512 tokens": ("llama-mini", 8, 512, 4),
}
"""Name -> preset, examples, tokens of each, and how many steps are timed in one process."""
WAYS = ("given back", "kept")


def measured(name: str, way: str) -> dict[str, float]:
    """The median time of a step in this process, page faults of a step, and the peak of what it holds."""
    preset, batch, length, times = STEPS[name]
    keeping: AbstractContextManager[None] = keep_freed_memory(CPU) if way == "kept" else nullcontext()
    meter, seconds = MemoryMeter(CPU), []
    with keeping:
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


def in_turns(name: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            command = [sys.executable, __file__, "--one", name, way]
            found[way].append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
    return found


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
        found = in_turns(name, options.rounds)
        timings = {way: Timing(tuple(each["seconds"] for each in found[way])) for way in WAYS}
        faults, peaks = (
            {way: statistics.median(each[key] for each in found[way]) for way in WAYS} for key in ("faults", "peak")
        )
        tell(name, timings, "given back")
        for way in WAYS:
            print(f"  {way:<34} {faults[way]:9,.0f} page faults a step, peak {peaks[way] / 1e6:,.0f} MB")
        cases[name] = {"seconds": rows(timings, "given back"), "faults": faults, "peaks": peaks}
    if options.json:
        write(options.json, {"benchmark": "freed memory", "baseline": "given back", "cases": cases})


if __name__ == "__main__":
    main()
