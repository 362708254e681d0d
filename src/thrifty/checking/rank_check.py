"""Check that several ranks compute the same values as one process.

The ranks are gloo processes on this machine. Each rank reads the recipe from a file and writes its observations. A rank
runs `python -m thrifty.checking.rank_check FOLDER RANK RANKS`.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from thrifty.checking.check_verdicts import PromiseVerdict, broken, holds, not_applicable
from thrifty.checking.observed_runs import (
    DRAWING,
    RANDOM,
    CheckSubject,
    StepObservations,
    one_line_error,
    reference_run,
    train_observed,
)
from thrifty.checking.rounding import IN_16_BITS, compare_rounding, loss_sensitivity
from thrifty.core.batch_norms import explain_divided_norms
from thrifty.core.child_python import child_environment
from thrifty.core.mesh import AXES, Mesh
from thrifty.core.out_of_memory import OutOfMemory, explain_out_of_memory
from thrifty.core.recipe import Recipe
from thrifty.recipes.recipe_toml import read_recipe, write_recipe
from thrifty.training.rank_setup import mesh_sizes
from thrifty.training.run_setup import prepare_run
from thrifty.training.sent_objects import read_value, write_value

PROMISE, ABOUT = "one rank or several", "ranks"
SECONDS = 300
"""Timeout of the ranks in seconds. After this time, ranks count as hanging."""
RECIPE, OBJECTS, OPTIONS, STORE = "recipe.toml", "objects", "options.json", "store"

Start = Callable[[Path, int], str]
"""Function that runs `work_as_rank` in a folder on a number of ranks, and returns an error message or ""."""


@dataclass(frozen=True)
class RankObservation:
    """Observations of a run on several ranks: losses, which are equal on all ranks, and whole gradients of the first
    step."""

    losses: list[float]
    gradients: dict[str, Tensor]


def smaller_mesh(recipe: Recipe) -> tuple[Mesh, int]:
    """Return the recipe's mesh with axes of at most 2 ranks, and its number of ranks (1 if nothing is divided)."""
    mesh = Mesh(**{axis: min(2, getattr(recipe.mesh, axis)) for axis in AXES})
    divides = any(technique.divides_ranks for technique in recipe.techniques)
    return mesh, max(2 if divides else 1, mesh.least_ranks)


def across_ranks(subject: CheckSubject, recipe: Recipe, folder: Path, start: Start | None = None) -> PromiseVerdict:
    """Train the recipe on several ranks and in one process, and compare both. The ranks have the recipe's mesh with
    axes of at most 2 ranks. Raises UsageError if the mesh and the techniques do not match."""
    mesh, count = smaller_mesh(recipe)
    if count == 1:
        return not_applicable(
            PROMISE, ABOUT, "the recipe divides nothing among ranks: it has no mesh and no parallelism.* technique"
        )
    settled = tuple(one for one in subject.techniques if one.stage not in DRAWING)
    recipe = replace(recipe, mesh=mesh, device="cpu", techniques=settled)
    mesh_sizes(recipe, count)
    subject = replace(subject, device=torch.device("cpu"), techniques=settled)
    alone, is_random = reference_run(subject, subject.alone)
    if alone.not_finite:
        return not_applicable(PROMISE, ABOUT, alone.not_finite)
    if is_random:  # with dropout, each rank drops different values
        alone, is_random_without_dropout = reference_run(subject, subject.alone, quiet=True)
        if is_random_without_dropout:
            return not_applicable(PROMISE, ABOUT, RANDOM)
    (folder / RECIPE).write_text(write_recipe(recipe), encoding="utf-8")
    write_value(recipe.objects, folder / OBJECTS)
    (folder / OPTIONS).write_text(json.dumps({"steps": subject.steps, "quiet": is_random}))
    names = " ".join(f"--without {one.name}" for one in subject.dividing)
    if trouble := (start or start_processes)(folder, count):
        return broken(PROMISE, ABOUT, f"{count} ranks fail: {trouble}", names)
    return _compared(subject, read_seen(folder, count), alone, is_random, count, names)


def _compared(
    subject: CheckSubject, seen: RankObservation | None, alone: StepObservations, quiet: bool, count: int, fix: str
) -> PromiseVerdict:
    if seen is None:
        return broken(PROMISE, ABOUT, f"{count} ranks do not agree on the loss of a step", fix)
    tolerance = sum(one.tolerance for one in subject.techniques)
    if any(one.is_low_precision for one in subject.techniques):
        tolerance = max(tolerance, IN_16_BITS)
    compared = compare_rounding(
        seen.losses,
        seen.gradients,
        alone,
        tolerance,
        lambda: loss_sensitivity(subject, subject.alone, alone, quiet),
    )
    text = f"{count} ranks compared with 1: {compared.text}"
    if compared.within:
        return holds(PROMISE, ABOUT, text)
    if norms := explain_divided_norms(subject.batch_norms, subject.dividing):
        return broken(PROMISE, ABOUT, f"{text}; {norms}", f"{fix}; or use norms of single examples, such as LayerNorm")
    ratio = _ratio(seen.gradients, alone.first)
    return broken(
        PROMISE,
        ABOUT,
        f"{text}; gradient norms are {ratio:.2g} times as large, worst for {compared.whose or 'none'}",
        fix,
    )


def _ratio(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    sizes = [math.sqrt(sum(float(tensor.square().sum()) for tensor in each.values())) for each in (actual, wanted)]
    return sizes[0] / max(sizes[1], 1e-30)


def work_as_rank(folder: Path) -> None:
    """Train as one rank of an initialized process group, and write the observations."""
    options = json.loads((folder / OPTIONS).read_text())
    recipe = replace(read_recipe(folder / RECIPE), objects=read_value(folder / OBJECTS))
    prepared = prepare_run(recipe, steps=options["steps"], quiet=True)
    subject = CheckSubject(lambda: prepared.run.plain, recipe.techniques, options["steps"], recipe.seed)
    _, trace = train_observed(subject, recipe.techniques, quiet=options["quiet"])
    rank = dist.get_rank()
    save_file({name: value.contiguous() for name, value in trace.first.items()}, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(trace.losses))


def read_seen(folder: Path, count: int) -> RankObservation | None:
    """Return the joined observations of all ranks; None if losses differ between ranks."""
    losses = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]
    gradients: dict[str, Tensor] = {}
    for rank in reversed(range(count)):
        gradients |= load_file(folder / f"{rank}.safetensors")
    return RankObservation(losses[0], gradients) if all(each == losses[0] for each in losses) else None


def start_processes(folder: Path, count: int) -> str:
    """Run each rank as a process with one thread; return an error message, or ""."""
    variables = child_environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    command = [sys.executable, "-m", __name__, str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), str(count)], env=variables, stderr=subprocess.DEVNULL)
        for rank in range(count)
    ]
    try:
        end = time.monotonic() + SECONDS
        with suppress(subprocess.TimeoutExpired):
            for process in processes:
                process.wait(max(0.0, end - time.monotonic()))
        return _trouble(folder, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _trouble(folder: Path, processes: list[subprocess.Popen]) -> str:
    codes = [process.poll() for process in processes]
    if not any(code is None or code for code in codes):
        return ""
    for rank in range(len(processes)):
        if (file := folder / f"{rank}.error").exists():
            return f"rank {rank}: {file.read_text(encoding='utf-8')}"
    if None in codes:
        return f"rank {codes.index(None)} hangs: no end after {SECONDS} s"
    return f"the ranks ended with codes {codes}"


def _main(folder: Path, rank: int, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / STORE), count), rank=rank, world_size=count)
    try:
        with explain_out_of_memory():
            work_as_rank(folder)
    except Exception as error:  # the starting process reports it
        text = error.what if isinstance(error, OutOfMemory) else one_line_error(error)
        (folder / f"{rank}.error").write_text(text, encoding="utf-8")
        os._exit(1)  # the other ranks wait in a collective until the starting process kills them
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
