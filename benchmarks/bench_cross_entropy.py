"""Chunked cross-entropy against the plain one: forward and backward, interleaved in one process.

    python benchmarks/bench_cross_entropy.py [--tokens 4096 --width 384 --vocabulary 8192 --rounds 9] [--json PATH]

`three products` is the lower bound: only the matrix products of forward and backward. Peak memory is the largest sum of
live tensors besides the inputs, from torch's allocator records.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.kernels.chunked_cross_entropy import chunk_step, linear_cross_entropy


def contenders(n: int, d: int, v: int) -> dict[str, Callable[[], object]]:
    dtype = torch.bfloat16
    hidden = torch.randn(n, d).to(dtype).requires_grad_()
    weight = (torch.randn(v, d) * 0.02).requires_grad_()
    targets = torch.randint(v, (n,))
    weights = torch.full((n,), 1 / n)
    compiled = torch.compile(chunk_step, dynamic=False)

    def clear() -> None:
        hidden.grad = weight.grad = None

    def three_products() -> None:
        cast, logits = weight.detach().to(dtype), torch.empty(n, v, dtype=dtype)
        torch.mm(hidden.detach(), cast.t(), out=logits)
        logits @ cast
        logits.t() @ hidden.detach()

    def plain() -> None:
        F.cross_entropy(F.linear(hidden, weight.to(dtype)).float(), targets).backward()
        clear()

    def chunked(step: Callable, expected: torch.Tensor | None, chunk: int) -> Callable[[], None]:
        def run() -> None:
            losses, _ = linear_cross_entropy(hidden, weight, targets, expected, chunk=chunk, step=step)
            (losses * weights).sum().backward()
            clear()

        return run

    return {
        "three products": three_products,
        "plain": plain,
        "chunks of 512": chunked(chunk_step, weights, 512),
        "chunks of 256, compiled": chunked(compiled, weights, 256),
        "chunks of 512, compiled": chunked(compiled, weights, 512),
        "chunks of 1024, compiled": chunked(compiled, weights, 1024),
        "512, compiled, not as expected": chunked(compiled, None, 512),
    }


def allocated(run: Callable[[], object]) -> int:
    """Return the bytes at the peak of `run` beyond the allocations before it, on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("width", 384), ("vocabulary", 8192), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = contenders(options.tokens, options.width, options.vocabulary)
    timings = side_by_side(runs, options.rounds)
    title = f"head and loss, forward and backward, bfloat16: {options.tokens} x {options.width} x {options.vocabulary}"
    print_timings(title, timings, "plain", options.tokens, "tokens/s")
    peaks = {name: allocated(run) for name, run in runs.items()}
    for name, peak in peaks.items():
        print(f"  {name:<34} {peak / 1e6:9.1f} MB peak")
    if options.json:
        save_timings(options.json, {"benchmark": "cross_entropy", "work": title, "peak_bytes": peaks}, timings, "plain")


if __name__ == "__main__":
    main()
