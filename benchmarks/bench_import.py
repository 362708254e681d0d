"""Import time of this package in a fresh Python, against torch.

    python benchmarks/bench_import.py [--rounds 7] [--json results/benchmarks/import-cpu.json]

`import thrifty`, the command line, lists, cards and the board do not import torch. Modules that train, explain and
compose do, and may take at most 1.5 times as long as torch.
"""

import argparse
import subprocess
import sys
from functools import partial
from pathlib import Path

from side_by_side import print_timings, save_timings, side_by_side

MODULES = (
    "torch",
    "thrifty",
    "thrifty.cli.main",
    "thrifty.interface.listings",
    "thrifty.interface.board",
    "thrifty.composition.compose",
    "thrifty.training.trainer",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways = {name: partial(subprocess.run, [sys.executable, "-c", f"import {name}"], check=True) for name in MODULES}
    timings = side_by_side(ways, options.rounds, warmup=1)
    print_timings("seconds of a fresh Python", timings, "torch")
    if options.json:
        save_timings(options.json, {}, timings, "torch")


if __name__ == "__main__":
    main()
