"""From a recipe to a run: opens the data, builds the plain run, composes, trains, resumes, restores.

The one place where all packages meet; the command line and `import thrifty` are thin over it.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thrifty.core.batches import BatchSource
from thrifty.core.compose import Composition, Plain, compose
from thrifty.core.errors import Infeasible, IntegrityError, UsageError
from thrifty.core.explain import explain
from thrifty.core.ranks import rank, ranks
from thrifty.core.recipe import Recipe
from thrifty.core.stages import Stage
from thrifty.core.state import Decision, TrainState, fill_tensor, read_log
from thrifty.data.corpus import TextData, open_data, say_on_stderr
from thrifty.data.tokenizing import read_tokenizer
from thrifty.models import build_model
from thrifty.objectives import find_objective
from thrifty.planning.probe import peak_flops
from thrifty.recipes.toml import read_recipe, recipe_to_data, write_recipe
from thrifty.recipes.values import differences
from thrifty.training import checkpoint, shelf
from thrifty.training.agreement import Alone, Together
from thrifty.training.environment import environment
from thrifty.training.loop import train as train_loop
from thrifty.training.memory import MemoryMeter
from thrifty.training.run_folder import RunFolder
from thrifty.training.session import Session

PROBED = 6
"""Steps timed to turn a budget of seconds into steps; the first two are not counted."""

FREE_TO_CHANGE = ("name", "about", "evaluation", "checkpoints")
"""Sections of a recipe that do not touch what is computed, so that a resumed run may have others."""

MACHINE = ("cpu", "cores", "device", "ranks", "torch", "thrifty")
"""What must be the same for a resumed run to keep what was counted and measured when it started."""

BuildModel = Callable[[], nn.Module]


@dataclass(frozen=True)
class Prepared:
    """A recipe with its data opened and its techniques composed: all that is needed to start or to resume."""

    recipe: Recipe
    data: TextData
    run: Composition


@contextmanager
def ranked() -> Iterator[None]:
    """The process group of a start by torchrun, for as long as the block lasts; nothing for a plain start."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
        # gloo's threads need the interpreter to put down the last tensors; one that meets its end aborts the process
        time.sleep(0.1)


@contextmanager
def claimed(path: Path, claim: Callable[[Path], RunFolder]) -> Iterator[RunFolder]:
    """The run folder, made or opened and locked by rank 0; an error there is raised on every rank."""
    held: list[RunFolder] = []
    together().first(lambda: held.append(claim(path)))
    folder = held[0] if held else RunFolder(path)
    with folder:
        yield folder


def together() -> Alone:
    return Together() if ranks() > 1 else Alone()


def choose_device(name: str) -> torch.device:
    """ "auto" takes a GPU where there is one; each local rank its own."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}", fix='use "cpu", "cuda" or "auto"')
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError('device = "cuda", but torch sees no GPU here', fix='--set device=cpu, or device = "auto"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank() % torch.cuda.device_count())


def prepare(recipe: Recipe, model: BuildModel | None = None, steps: int | None = None, quiet: bool = False) -> Prepared:
    """Open the data and compose the run.

    `model` builds the plain model in place of the recipe's. `steps` is known when a run is resumed; otherwise the
    recipe's budget decides, a budget of seconds by timing some real steps.
    """
    _refuse_idle_ranks(recipe)
    device = choose_device(recipe.device)
    say = (lambda text: None) if quiet else say_on_stderr
    together().first(lambda: open_data(recipe.data, recipe.seed, say) and None)  # prepared once, then opened by all
    data = open_data(recipe.data, recipe.seed, say)

    def build() -> nn.Module:
        torch.manual_seed(recipe.seed)
        return model() if model else build_model(recipe.model, data.vocabulary, recipe.data.length, recipe.seed)

    plain = Plain(build, data.train, find_objective(recipe.objective.name))
    return Prepared(recipe, data, compose(plain, recipe.techniques, steps or _steps(recipe, plain, device), device))


def _refuse_idle_ranks(recipe: Recipe) -> None:
    if ranks() > 1 and not any("distribution of data" in technique.claims for technique in recipe.techniques):
        raise UsageError(
            f"there are {ranks()} ranks, and no technique of the recipe divides the work among them",
            fix="--with parallelism.replicate or --with parallelism.shard, or start one process",
        )


def _steps(recipe: Recipe, plain: Plain, device: torch.device) -> int:
    """The number of steps that the budget pays for; raises Infeasible when it is none."""
    budget = recipe.budget
    if budget.steps is not None:
        return budget.steps
    if budget.seconds is not None:
        return _steps_in_seconds(budget.seconds, recipe, plain, device)
    if budget.tokens is None:
        raise UsageError("the recipe has no budget", fix="--budget 10min, --budget 500steps or --budget 1e7tokens")
    per_step = recipe.data.batch * recipe.data.length
    if budget.tokens < per_step:
        raise Infeasible(
            f"a budget of {budget.tokens:,.0f} tokens does not fit one step of {per_step:,}",
            fix=f"--budget {per_step}tokens or more, or a smaller data.batch",
        )
    return int(budget.tokens // per_step)


def _steps_in_seconds(budget: float, recipe: Recipe, plain: Plain, device: torch.device) -> int:
    """Times a few real steps of a run that is thrown away; what that takes is part of the budget."""
    began = time.monotonic()
    run = compose(plain, recipe.techniques, 1000, device)
    with closing(train_loop(run, run.start(), recipe.seed)) as records:
        step = statistics.median([record.seconds for _, record in zip(range(PROBED), records, strict=False)][2:])
    spent = time.monotonic() - began
    steps = together().first(lambda: math.floor((budget - spent) / step))
    if steps < 1:
        raise Infeasible(
            f"a budget of {budget:g} s does not fit one step: starting takes {spent:.1f} s and a step {step:.2f} s",
            fix=f"--budget {math.ceil(spent + 10 * step)}s or more",
        )
    return steps


def train(
    recipe: Recipe,
    runs: Path = Path("runs"),
    *,
    model: BuildModel | None = None,
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train by a recipe into runs/NAME and return the summary; raises UsageError when that folder exists.

    `model` builds a model of your own in place of the recipe's: a module with a list of blocks that maps tokens (b, t)
    to hidden states (b, t, d) and has a linear `head`, or that maps them to logits.
    """
    with ranked(), claimed(Path(runs) / recipe.name, RunFolder.create) as folder:
        return _run(prepare(recipe, model, quiet=quiet), folder, quiet, origins or {})


def resume(
    folder: Path,
    recipe: Recipe,
    *,
    fork: str | None = None,
    model: BuildModel | None = None,
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Go on from the newest undamaged checkpoint of a run folder, or from the first step if it ended before its first.

    The recipe must be the one that the run was started with; UsageError says what differs. With `fork` the run goes
    on as a new one of that name beside the old, by the changed recipe: what the old state has by the same name and
    shape is taken over, everything else starts fresh and is named. `origins` says where changed values came from.
    """
    with ranked():
        if fork is not None:
            return _fork(folder, replace(recipe, name=fork), folder.parent / fork, model, origins or {}, quiet)
        with claimed(folder, lambda path: RunFolder.open(path).lock()) as opened:
            return _resume(opened, recipe, model, origins or {}, quiet)


def _resume(
    folder: RunFolder, recipe: Recipe, model: BuildModel | None, origins: Mapping[str, str], quiet: bool
) -> dict[str, Any]:
    found = _newest(folder)
    started = found.scalars["recipe"] if found else recipe_to_data(read_recipe(folder.recipe))
    changes = differences(started, recipe_to_data(recipe))
    if refused := [line for line in changes if line.split(".")[0].split(":")[0] not in FREE_TO_CHANGE]:
        raise UsageError(
            "the recipe is not the one this run was started with: " + "; ".join(refused),
            fix=f"undo the change, or go on as a new run: thrifty resume {folder.path} --fork NAME",
        )
    if found is None:
        again = [f"{folder.path} ended before its first checkpoint: started again from the first step"]
        return _run(prepare(recipe, model, quiet=quiet), folder, quiet, origins, fill=lambda state: again)
    if found.step >= found.scalars["steps"] and _kept(folder, "summary").get("status") == "finished":
        raise UsageError(f"{folder.path} is finished: it made all its {found.step} steps", fix="go on with --fork NAME")

    def fill(state: TrainState) -> list[str]:
        checkpoint.fill(found, state.tensors(), ranks=together())
        state.load_scalars(found.scalars)
        return found.notices

    prepared = prepare(recipe, model, found.scalars["steps"], quiet)
    return _run(prepared, folder, quiet, origins, read_log(found.scalars), fill)


def _newest(folder: RunFolder) -> checkpoint.Found | None:
    """The newest undamaged checkpoint; None when the run ended before it made one."""
    try:
        return checkpoint.find(folder.checkpoints, ranks=together())
    except IntegrityError:
        if together().first(lambda: len(shelf.checkpoints(folder.checkpoints))):
            raise
        return None


def _fork(
    old: Path, recipe: Recipe, target: Path, model: BuildModel | None, origins: Mapping[str, str], quiet: bool
) -> dict[str, Any]:
    """A new run from an old state: what has the same name and shape is taken over, the rest starts fresh."""
    found = checkpoint.find(old / "checkpoints", ranks=together())
    tensors = checkpoint.load(found.path.parent, found.step).tensors

    def fill(state: TrainState) -> list[str]:
        fresh = []
        for name, tensor in state.tensors().items():
            if name in tensors and tensors[name].shape == tensor.shape:
                fill_tensor(tensor, tensors[name])
            else:
                fresh.append(name)
        state.load_scalars(found.scalars)
        taken = f"forked from {found.path} at step {found.step}"
        return [*found.notices, taken + (f"; {len(fresh)} tensors start fresh, such as {fresh[0]}" if fresh else "")]

    with claimed(target, RunFolder.create) as folder:
        prepared = prepare(recipe, model, quiet=quiet)
        if prepared.run.steps <= found.step:
            raise UsageError(
                f"the budget of {prepared.run.steps} steps is used up: {old} has made {found.step}",
                fix=f"--set budget.steps={2 * found.step}, counted from the first step of {old.name}",
            )
        inherited = {**_kept(RunFolder(old), "origins"), **origins}
        return _run(prepared, folder, quiet, inherited, read_log(found.scalars), fill)


def _run(
    prepared: Prepared,
    folder: RunFolder,
    quiet: bool,
    origins: Mapping[str, str],
    log: list[Decision] | None = None,
    fill: Callable[[TrainState], list[str]] = lambda state: [],
) -> dict[str, Any]:
    """Build the state, write down what the run is, and train. `fill` loads values and says what is worth knowing."""
    recipe, run, data = prepared.recipe, prepared.run, prepared.data
    here = environment(str(run.device)) | {"ranks": ranks()}
    before = {name: _kept(folder, name) for name in ("origins", "environment", "explanation", "summary")}
    same_machine = all(before["environment"].get(name) == here[name] for name in MACHINE)
    known = same_machine and bool(before["explanation"] and before["summary"])
    explanation = None if known else explain(run)
    peak = before["summary"]["peak_flops_per_second"] if known else _peak(recipe, run.device)
    meter = MemoryMeter(run.device)
    state = run.start() if log is None else run.place(log)
    notices = fill(state)
    explained = explanation.as_dict(run.notes) if explanation else before["explanation"]
    facts = {
        "folder": str(folder.path),
        "unigram_entropy": data.unigram_entropy,
        "bytes_per_token": data.bytes_per_token,
        "predicted_memory": explained["footprint"]["memory"],
        "flops_per_step": explained["plain"]["flops"],
        "peak_flops_per_second": peak,
    }
    if rank() == 0:
        first = {name: before["environment"][name] for name in ("command", "started") if name in before["environment"]}
        folder.write_text("recipe.toml", write_recipe(recipe))
        folder.write_json("origins", {**before["origins"], **origins})
        folder.write_json("environment", here | first)
        folder.write_json("explanation", explained)
        data.tokenizer.save(folder.tokenizer)
        for text in notices:
            folder.append({"kind": "notice", "step": state.step, "text": text})
    examples = list(data.held_out.batches(recipe.evaluation.examples, recipe.data.batch))
    session = Session(recipe_to_data(recipe), recipe, run, examples, folder, facts, notices, quiet)
    return session.run_to_end(state, meter)


def _kept(folder: RunFolder, name: str) -> dict[str, Any]:
    """What an earlier part of the run wrote under this name, the same on every rank; {} where there is nothing."""

    def read() -> dict[str, Any]:
        with suppress(IntegrityError):
            return folder.read_json(name)
        return {}

    return together().first(read)


def _peak(recipe: Recipe, device: torch.device) -> float:
    """FLOP/s of the matrix products of all ranks in the run's number format, measured."""
    return peak_flops(device, _matrix_type(recipe)) * ranks()


def _matrix_type(recipe: Recipe) -> torch.dtype:
    """The number format of the run's matrix products, whose measured rate a share of peak refers to."""
    mixed = any("precision" in technique.claims for technique in recipe.techniques)
    return torch.bfloat16 if mixed else torch.float32


def restore(folder: Path, step: int | None = None) -> tuple[nn.Module, Recipe]:
    """The trained model of a run folder with what its techniques put on taken off again, and the recipe.

    Takes the newest undamaged checkpoint, or the one of `step`. Needs no data: the vocabulary is the tokenizer's.
    """
    recipe = read_recipe(folder / "recipe.toml")
    found = checkpoint.load(folder / "checkpoints", step)
    vocabulary = read_tokenizer(folder / "tokenizer.json").vocabulary

    def build() -> nn.Module:
        torch.manual_seed(recipe.seed)
        return build_model(recipe.model, vocabulary, recipe.data.length, recipe.seed)

    how = {Stage.COMPILE, Stage.SHARD, Stage.RECOMPUTE, Stage.REDUCE}
    chosen = [technique for technique in recipe.techniques if technique.stage not in how]
    run = compose(Plain(build, BatchSource(), find_objective(recipe.objective.name)), chosen, found.scalars["steps"])
    model = run.build_model(read_log(found.scalars))
    for kind, tensors in (("parameters", model.named_parameters()), ("buffers", model.named_buffers())):
        for name, tensor in tensors:
            if f"{kind}/{name}" in found.tensors:
                fill_tensor(tensor, found.tensors[f"{kind}/{name}"])
    for technique in reversed(run.techniques):
        model = technique.finish(model)
    return model.eval(), recipe
