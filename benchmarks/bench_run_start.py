"""Start-up of a comparison's runs: forks of a server that has imported torch, against new Python processes.

    python benchmarks/bench_run_start.py [--rounds 5] [--json results/benchmarks/run-start-cpu.json]

A run has one step of a tiny model. Its time is therefore the start-up: imports, data, counting of the step, evaluation
and checkpoint. In a comparison, a run is a fork that reuses the counted step of its variant. The last line is the same
run without any start, in the process of the benchmark.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from side_by_side import print_timings, save_timings, side_by_side
from thrifty.comparing.run_launchers import RunLauncher, SameProcess, Worker
from thrifty.core.recipe import Budget, EvaluationSettings
from thrifty.recipes.vision_recipes import vit_digits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe = replace(vit_digits(), budget=Budget(steps=1), evaluation=EvaluationSettings(examples=64))
    server = Worker()
    launchers: dict[str, RunLauncher] = {
        "new process": Worker(["env"]),
        "fork": server,
        "fork of a counted variant": server,
        "no start": SameProcess(),
    }
    with tempfile.TemporaryDirectory() as folder:
        numbers = count()
        server.count(replace(recipe, name="fork-of-a-counted-variant-count"), Path(folder))

        def start(name: str) -> None:
            named = replace(recipe, name=f"{name.replace(' ', '-')}-seed-{next(numbers)}")
            ended = launchers[name](named, Path(folder))
            assert ended.status == "finished", ended.error

        starts: dict[str, Callable[[], None]] = {name: partial(start, name) for name in launchers}
        timings = side_by_side(starts, options.rounds, warmup=1)
        server.close()
    print_timings("run of one step", timings, "new process")
    if options.json:
        save_timings(options.json, {}, timings, "new process")


if __name__ == "__main__":
    main()
