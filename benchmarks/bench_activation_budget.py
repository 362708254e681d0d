"""Predicted and measured memory of GPT-2-small with a budget of half its activations.

Promise: the measured peak of a step is within 5 % of the peak that `thrifty explain` predicts. `thrifty train` makes
the run and reports resident memory. A step of its recipe is then measured in two ways independent of the plan: by
tracing each storage until it is freed, and by the allocator's events. Parameters and optimizer state exist before the
step and are excluded. With a file name, the results are saved.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from side_by_side import write
from thrifty.cli.recipe_options import build_recipe
from thrifty.composition.compose import Run
from thrifty.core.tensor_tracing import StepTrace, gc_disabled
from thrifty.recipes.language_recipes import text
from thrifty.techniques.memory.activation_budget import ACTIVATION_PLANNER
from thrifty.training.run_setup import prepare_run

BUDGET, STEPS = "memory.activation_budget", 2
UNPLANNED = [t.name for t in text().techniques if t.name in ("compile", "attention.tiled")]
"""Techniques of the recipe that are removed: a plan requires single operations, and uncompiled tiles are slow."""
WORDS = [
    *("text", "--model", "gpt-small", "--budget", f"{STEPS}steps", "--set", "device=cpu"),
    *(
        "--set",
        "data.vocabulary=50257",
        "--set",
        "evaluation.examples=4",
        "--set",
        "data.batch=4",
        "--set",
        "data.length=1024",
    ),
    *("--with", "precision.mixed", "--with", f"{BUDGET}:bytes=0.5"),
    *(word for name in UNPLANNED for word in ("--without", name)),
]


def thrifty(verb: str, *more: str) -> dict:
    """Return the JSON output of a command."""
    command = [sys.executable, "-m", "thrifty", verb, *WORDS, "--json", *more]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def counted(run: Run, model: nn.Module) -> int:
    batch = run.source.at(1)
    known = [*model.parameters(), *model.buffers(), *batch.fields.values(), batch.weight]
    with gc_disabled(), StepTrace(*known) as live:
        run.backward(model, run.objective, batch)
    model.zero_grad()
    return live.peak


def allocated(run: Run, model: nn.Module) -> int:
    """Return the allocator's peak, including temporary memory inside operations."""
    batch = run.source.at(1)
    with gc_disabled(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run.backward(model, run.objective, batch)
    model.zero_grad()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def measured(recipe: Path) -> dict[str, float]:
    """Return bytes at the peak of a step, with the budget and without."""
    plain = prepare_run(build_recipe(str(recipe), removals=(BUDGET,)).recipe(), quiet=True).run
    without = counted(plain, plain.build_model().train())
    run = prepare_run(build_recipe(str(recipe)).recipe(), quiet=True).run
    model = run.build_model().train()
    peak = counted(run, model)
    ((_, plan),) = ACTIVATION_PLANNER.of(model).plans.values()  # type: ignore[union-attr]
    return {
        "without a budget, counted": without,
        "planned": plan.peak,
        "counted": peak,
        "allocated": allocated(run, model),
    }


def main() -> None:
    began = time.perf_counter()
    explained = thrifty("explain")
    seconds = time.perf_counter() - began
    print(f"explained in {seconds:.1f} s", *explained["decisions"], sep="\n  ")
    with tempfile.TemporaryDirectory() as folder:
        summary = thrifty("train", "--quiet", "--name", "measured", "--runs", folder)
        result = measured(Path(folder) / "measured" / "recipe.toml")
    footprint = explained["footprint"]
    promised = max(footprint["gradients"], footprint["activations"]) + footprint["temporary"]
    result |= {
        "promised": promised,
        "whole run, promised": footprint["memory"],
        "whole run, resident": summary["peak_memory"],
    }
    ratios = {
        "counted of promised": result["counted"] / promised,
        "allocated of promised": result["allocated"] / promised,
        "counted of without a budget": result["counted"] / result["without a budget, counted"],
        "resident of promised": summary["peak_memory"] / footprint["memory"],
    }
    print(f"\n{explained['parameters']:,} parameters, torch {torch.__version__}")
    for name, value in result.items():
        print(f"  {name:<40} {value / 1e6:10.2f} MB")
    for name, value in ratios.items():
        print(f"  {name:<40} {value:10.4f}")
    if len(sys.argv) > 1:
        facts = {"benchmark": "activation budget", "thrifty": WORDS, "parameters": explained["parameters"]}
        facts |= {"seconds to explain": seconds, "bytes at the peak": result, "ratios": ratios}
        write(Path(sys.argv[1]), facts | {"decisions": explained["decisions"]})


if __name__ == "__main__":
    main()
