"""Wait policies of OpenMP threads: spin, sleep, or spin briefly and then sleep.

    python benchmarks/bench_waiting.py [--rounds 3] [--json results/benchmarks/waiting-cpu.json]

OpenMP reads the policy once when it is loaded, so each policy has its own processes. Policies alternate, first on the
machine alone, then with another process that keeps one core busy. Work: training steps of two presets, and attention
over one block in eight, with many small products. The command line and `make bench` use `a little`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from bench_sparse_attention import WIDTH, grid_with
from side_by_side import Timing, print_timings, rows, write
from steps import SameRows, whole_step
from thrifty.composition.compose import BaseRun, compose
from thrifty.core.recipe import ModelSettings
from thrifty.kernels.sparse_attention.block_attention import block_attention
from thrifty.models import build_model
from thrifty.objectives import find_objective
from thrifty.techniques.optimizers.adamw import AdamW

WAYS = {
    "spin": {},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "a little": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"},
    "ten times that": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"},
}
VOCABULARY = 4096


def training_step(preset: str, batch: int, length: int) -> Callable[[], object]:
    tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    source = SameRows({"tokens": tokens})
    model = ModelSettings(preset=preset)
    plain = BaseRun(lambda: build_model(model, VOCABULARY, length, 0), source, find_objective("next_token"))
    return whole_step(compose(plain, [AdamW(lr=1e-3)], 10))


def blocks(tokens: int) -> Callable[[], object]:
    qkv = [torch.randn(1, 4, tokens, WIDTH).requires_grad_() for _ in range(3)]
    core = partial(block_attention, grid=grid_with(tokens, block=64, share=8, causal=True))
    return lambda: torch.autograd.grad(core(*qkv).sum(), qkv)


WORK: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
    "llama-nano, 4 x 64 tokens": (partial(training_step, "llama-nano", 4, 64), 30),
    "llama-micro, 8 x 256 tokens": (partial(training_step, "llama-micro", 8, 256), 4),
    "block attention, 2,048 tokens": (partial(blocks, 2048), 10),
}
"""Name -> constructor, and number of timed repetitions in one process."""


def seconds_of_each() -> dict[str, float]:
    """Return the median seconds of each work in this process."""
    medians = {}
    for name, (build, times) in WORK.items():
        work, seconds = build(), []
        for _ in range(times + 2):
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
        medians[name] = statistics.median(seconds[2:])
    return medians


@contextmanager
def busy_neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def alternate(rounds: int) -> dict[str, dict[str, Timing]]:
    """Return the seconds of each work under each policy, over separate processes."""
    seconds: dict[str, dict[str, list[float]]] = {name: {way: [] for way in WAYS} for name in WORK}
    plain = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    for round_number in range(rounds):
        for way in list(WAYS)[round_number % len(WAYS) :] + list(WAYS)[: round_number % len(WAYS)]:
            command = [sys.executable, __file__, "--one"]
            output = subprocess.run(
                command, env=plain | WAYS[way], stdout=subprocess.PIPE, check=True, text=True
            ).stdout
            for name, median in json.loads(output).items():
                seconds[name][way].append(median)
    return {name: {way: Timing(tuple(values)) for way, values in ways.items()} for name, ways in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="results file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(seconds_of_each()))
        return
    cases = {}
    for load, neighbour in (("alone", nullcontext), ("beside a busy process", busy_neighbour)):
        with neighbour():
            timings = alternate(options.rounds)
        for name, ways in timings.items():
            print_timings(f"{name}, {load}", ways, "sleep")
        cases[load] = {name: rows(ways, "sleep") for name, ways in timings.items()}
    if options.json:
        write(options.json, {"benchmark": "waiting threads", "ways": WAYS, "baseline": "sleep", "cases": cases})


if __name__ == "__main__":
    main()
