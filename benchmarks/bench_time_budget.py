"""Used share of budgets in seconds while other processes disturb the machine.

    python benchmarks/bench_time_budget.py FILE.json [--runs 20] [--seconds 30] [--quiet-machine]

Promise: each run of `thrifty train` uses 95 to 101 % of its budget, by the clock of the run ("own_share"). "share" is
by the clock of the process that starts the run, and contains the exit of the process. From the start to the end of a
run, busy processes start and end at random, on up to all cores. Runs alternate between a plain recipe, a growing model
and averaged weights.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from thrifty.training.run_environment import environment

BUSY = "while True: sum(range(10**6))"
RECIPES = {
    "plain": ["--set", "model.depth=2", "--set", "data.batch=8"],
    "growing": ["--set", "data.batch=8", "--with", "growth.stacking"],
    "averaged": ["--set", "data.batch=4", "--with", "averaging.ema", "--with", "gradients.clip"],
}


class Disturbance(threading.Thread):
    """Busy processes that start and end at random until `stop`."""

    def __init__(self, seed: int):
        super().__init__(daemon=True)
        self.random, self.ended = random.Random(seed), threading.Event()
        self.busy: list[subprocess.Popen[bytes]] = []
        self.changes = 0

    def run(self) -> None:
        while not self.ended.is_set():
            wanted = self.random.randint(0, os.cpu_count() or 1)
            self.changes += 1
            while len(self.busy) > wanted:
                self.busy.pop().kill()
            while len(self.busy) < wanted:
                self.busy.append(subprocess.Popen([sys.executable, "-c", BUSY]))
            self.ended.wait(self.random.uniform(1.0, 8.0))
        for process in self.busy:
            process.kill()

    def stop(self) -> None:
        self.ended.set()
        self.join()


def train(recipe: str, budget: str, name: str, folder: Path) -> None:
    command = ["train", "plain", "--data", "python-stdlib", "--budget", budget, "--name", name, "--quiet"]
    subprocess.run([sys.executable, "-m", "thrifty", *command, *RECIPES[recipe]], cwd=folder, check=True)


def measured_run(recipe: str, seconds: float, seed: int, is_quiet: bool, folder: Path) -> dict[str, Any]:
    """Train one run with a budget and return its used share, measured from outside and by the run."""
    disturbance = Disturbance(seed)
    if not is_quiet:
        disturbance.start()
    name = f"run-{seed}"
    start = time.monotonic()
    train(recipe, f"{seconds:g}s", name, folder)
    elapsed = time.monotonic() - start
    if not is_quiet:
        disturbance.stop()
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    lengths = (folder / "runs" / name / "records.jsonl").read_text().count('"kind": "length"')
    shares = {"share": elapsed / seconds, "own_share": summary["used_seconds"] / seconds}
    return {"recipe": recipe, **shares, "steps": summary["steps"], "estimates": lengths, "changes": disturbance.changes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--quiet-machine", action="store_true", help="start no busy processes")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        train("plain", "1step", "preparation", Path(folder))  # tokenizes the data, once per machine
        for number in range(options.runs):
            recipe = list(RECIPES)[number % len(RECIPES)]
            runs.append(measured_run(recipe, options.seconds, number, options.quiet_machine, Path(folder)))
            print(json.dumps(runs[-1]), flush=True)
    summary: dict[str, Any] = {}
    for name in ("share", "own_share"):
        values = sorted(run[name] for run in runs)
        summary[name] = {"median": median(values), "least": values[0], "most": values[-1]}
    content = {
        "command": sys.argv,
        "torch": torch.__version__,
        "environment": environment("cpu"),
        **summary,
        "runs": runs,
    }
    options.file.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
