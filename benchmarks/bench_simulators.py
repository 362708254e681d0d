"""Cost of simulating accelerators: BERT-large through every design, and one matrix product against SCALE-Sim.

Promise: 24 layers x 16 heads x 384 to 512 tokens through all designs take less than 20 s on 2 cores. A matrix product
of SCALE-Sim is at least 100 times faster than in SCALE-Sim. SCALE-Sim requires NumPy 1, so it runs in another Python:
--scale-sim PYTHON names one with scalesim 3.0.0. With a file name, the results are saved.
"""

import argparse
import csv
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from thrifty.simulators.accelerator.accelerator_file import find_machine, machine_names
from thrifty.simulators.accelerator.accelerator_simulation import limit_resources, simulate
from thrifty.simulators.accelerator.attention_trace import AttentionTrace, layer_of
from thrifty.simulators.accelerator.design_filters import SELECTIVE, apply_design_filter
from thrifty.simulators.accelerator.scale_sim import compute_report, read_cfg, read_topology
from thrifty.simulators.accelerator.synthetic_traces import synthetic_trace

LAYERS, HEADS, WIDTH = 24, 16, 64
CFG = """[general]
run_name = run
[architecture_presets]
ArrayHeight : 32
ArrayWidth : 32
IfmapSramSzkB : 64
FilterSramSzkB : 64
OfmapSramSzkB : 64
IfmapOffset : 0
FilterOffset : 10000000
OfmapOffset : 20000000
Dataflow : os
Bandwidth : 64
ReadRequestBuffer : 32
WriteRequestBuffer : 32
[layout]
IfmapCustomLayout : False
IfmapSRAMBankBandwidth : 10
IfmapSRAMBankNum : 10
IfmapSRAMBankPort : 2
FilterCustomLayout : False
FilterSRAMBankBandwidth : 10
FilterSRAMBankNum : 10
FilterSRAMBankPort : 2
[sparsity]
SparsitySupport : false
SparseRep : ellpack_block
OptimizedMapping : false
BlockSize : 8
RandomNumberGeneratorSeed : 40
[run_presets]
InterfaceBandwidth : USER
UseRamulatorTrace : False
"""
TOPOLOGY = "Layer,M,N,K,\nscores,512,512,64,\n"


def timed(work: Callable[[], Any], times: int = 3) -> tuple[float, Any]:
    """Return the median of the seconds and the last result."""
    seconds, result = [], None
    for _ in range(times):
        began = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), result


def bert_large(tokens: int, engine: str) -> dict[str, float]:
    """Return the seconds of each machine on masks at density 0.25, and of generating the masks."""
    began = time.perf_counter()
    trace = synthetic_trace("uniform", 0.25, layers=LAYERS, heads=HEADS, tokens=tokens, width=WIDTH)
    seconds = {"the trace": time.perf_counter() - began}
    for name in machine_names("attention"):
        machine = find_machine(name) if engine == "scan" else limit_resources(find_machine(name), bandwidth=64e9)
        seconds[name] = timed(lambda m=machine: simulate(m, trace, engine))[0]
    return seconds


def own_filters(tokens: int) -> dict[str, float]:
    """Return the seconds of each filter on random queries and keys of one layer."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, HEADS, tokens, WIDTH)).astype(np.float32) for _ in range(3))
    trace = AttentionTrace("random", (layer_of("layer", q=q, k=k, v=v),))
    return {name: timed(lambda n=name: apply_design_filter(trace, n, 0.25), 1)[0] for name in SELECTIVE}


def scale_sim(python: str | None) -> dict[str, Any]:
    """Return seconds and cycles of one matrix product, including file reading, here and optionally in SCALE-Sim."""
    with tempfile.TemporaryDirectory() as folder:
        cfg, topology = Path(folder, "a.cfg"), Path(folder, "t.csv")
        cfg.write_text(CFG)
        topology.write_text(TOPOLOGY)
        seconds, rows = timed(lambda: compute_report(read_topology(topology), read_cfg(cfg)), 20)
        result = {"cycles": rows[0]["Total Cycles"], "seconds": seconds}
        if python is None:
            return result
        words = [python, "-m", "scalesim.scale", "-t", topology, "-l", topology, "-c", cfg, "-i", "gemm"]
        began = time.perf_counter()
        subprocess.run([*map(str, words), "-p", folder], check=True, capture_output=True, cwd=folder)
        took = time.perf_counter() - began
        start, _ = timed(lambda: subprocess.run([python, "-c", "import scalesim.scale_sim"], check=True))
        with (Path(folder) / "run" / "COMPUTE_REPORT.csv").open() as file:
            report = next(csv.DictReader(file, skipinitialspace=True))
        theirs = int(report["Total Cycles"])
        assert theirs == result["cycles"], (theirs, result)
        return result | {"scale_sim_seconds": took - start, "scale_sim_start": start, "times": (took - start) / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", help="results file")
    parser.add_argument("--scale-sim", metavar="PYTHON", help="a Python with scalesim 3.0.0")
    parser.add_argument("--tokens", type=int, nargs="+", default=[384, 512])
    options = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "simulators", "threads": torch.get_num_threads(), "cases": {}}
    for tokens in options.tokens:
        for engine in ("scan", "event"):
            seconds = bert_large(tokens, engine)
            results["cases"][f"{tokens} tokens, {engine}"] = seconds
            slowest = max((name for name in seconds if name != "the trace"), key=seconds.__getitem__)
            print(
                f"{LAYERS} x {HEADS} heads, {tokens} tokens, {engine}: all designs {sum(seconds.values()):.2f} s, "
                f"masks generated in {seconds['the trace']:.2f} s, slowest {slowest} with {seconds[slowest]:.2f} s"
            )
    results["own filters, one layer of 384 tokens"] = own_filters(384)
    for name, took in results["own filters, one layer of 384 tokens"].items():
        print(f"own filter of {name}, one layer of {HEADS} heads x 384 tokens: {took:.2f} s")
    results["scale_sim"] = case = scale_sim(options.scale_sim)
    print(f"SCALE-Sim's 512 x 512 x 64: {case['cycles']:,} cycles in {case['seconds'] * 1e3:.2f} ms", end="")
    if "times" in case:
        print(
            f"; SCALE-Sim {case['scale_sim_seconds']:.2f} s plus {case['scale_sim_start']:.2f} s to start,  "
            f"{case['times']:,.0f} times as long"
        )
    else:
        print("; SCALE-Sim was not run (--scale-sim)")
    if options.file:
        from side_by_side import write

        write(Path(options.file), results)


if __name__ == "__main__":
    main()
