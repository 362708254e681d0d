"""GPT-2-small with a budget of half its activations: what `thrifty explain` promises, and what the run then holds.

Promise: the measured peak of a step is within 5 % of the promised one. The promise is what the command line prints. The
run is made by `thrifty train`, which reports resident memory; then a step of that run's recipe is measured in two
ways that know nothing of the plan: by following each storage until it is freed, and by the allocator's own events.
Parameters and optimizer state are there before the step and left out. With a file name the figures are kept.
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
"""Of the recipe: a plan follows single operations, and tiles do not pay where they are not compiled."""
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
    """What the command line says, as JSON."""
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
    """Scratch memory inside operations included."""
    batch = run.source.at(1)
    with gc_disabled(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run.backward(model, run.objective, batch)
    model.zero_grad()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def measured(recipe: Path) -> dict[str, float]:
    """Bytes at the peak of a step, of the recipe and of the one without a budget."""
    plain = prepare_run(build_recipe(str(recipe), removals=(BUDGET,)).recipe(), quiet=True).run
    without = counted(plain, plain.build_model().train())
    run = prepare_run(build_recipe(str(recipe)).recipe(), quiet=True).run
    model = run.build_model().train()
    found = counted(run, model)
    ((_, plan),) = ACTIVATION_PLANNER.of(model).plans.values()  # type: ignore[union-attr]
    return {
        "without a budget, counted": without,
        "planned": plan.peak,
        "counted": found,
        "allocated": allocated(run, model),
    }


def main() -> None:
    began = time.perf_counter()
    explained = thrifty("explain")
    seconds = time.perf_counter() - began
    print(f"explained in {seconds:.1f} s", *explained["decisions"], sep="\n  ")
    with tempfile.TemporaryDirectory() as folder:
        summary = thrifty("train", "--quiet", "--name", "measured", "--runs", folder)
        found = measured(Path(folder) / "measured" / "recipe.toml")
    footprint = explained["footprint"]
    promised = max(footprint["gradients"], footprint["activations"]) + footprint["temporary"]
    found |= {
        "promised": promised,
        "whole run, promised": footprint["memory"],
        "whole run, resident": summary["peak_memory"],
    }
    ratios = {
        "counted of promised": found["counted"] / promised,
        "allocated of promised": found["allocated"] / promised,
        "counted of without a budget": found["counted"] / found["without a budget, counted"],
        "resident of promised": summary["peak_memory"] / footprint["memory"],
    }
    print(f"\n{explained['parameters']:,} parameters, torch {torch.__version__}")
    for name, value in found.items():
        print(f"  {name:<40} {value / 1e6:10.2f} MB")
    for name, value in ratios.items():
        print(f"  {name:<40} {value:10.4f}")
    if len(sys.argv) > 1:
        facts = {"benchmark": "activation budget", "thrifty": WORDS, "parameters": explained["parameters"]}
        facts |= {"seconds to explain": seconds, "bytes at the peak": found, "ratios": ratios}
        write(Path(sys.argv[1]), facts | {"decisions": explained["decisions"]})


if __name__ == "__main__":
    main()
