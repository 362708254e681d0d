"""From a recipe to a composed run: processes, device, data, the number of steps."""

import math
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.core import mesh
from thrifty.core.claims import Claim
from thrifty.core.errors import InfeasibleError, ThriftyError, UsageError
from thrifty.core.objective import Objective
from thrifty.core.ranks import rank, ranks
from thrifty.core.recipe import Recipe
from thrifty.core.stages import Stage
from thrifty.data.catalogue import entry_of_model
from thrifty.data.chat.chat_data import ChatLearningSettings, open_instructions
from thrifty.data.images.image_data import holds_images, open_images
from thrifty.data.pairs.pair_data import open_image_pairs
from thrifty.data.run_data import RunData
from thrifty.data.text.text_data import TextData, open_text, print_to_stderr
from thrifty.data.text.text_pairs import holds_pairs
from thrifty.data.tokenizer import read_tokenizer
from thrifty.models import build_model_for, own_patch, own_side
from thrifty.objectives import chosen_objective
from thrifty.objectives.chat_answers import ChatAnswers
from thrifty.objectives.sequence_to_sequence import SequenceToSequence
from thrifty.training import heartbeat
from thrifty.training.determinism import deterministic_kernels
from thrifty.training.rank_sync import process_group_sync

PROBED = 6
"""Steps timed to turn a budget of seconds into steps; the first two are not counted."""

_NO_LIMIT = timedelta(days=30)
"""Of a collective: the heartbeat finds who hangs, and one rank may prepare text for hours while the others wait."""

BuildModel = Callable[[], nn.Module]


@dataclass(frozen=True)
class PreparedRun:
    """A recipe with its data opened and its techniques composed: all that is needed to start or to resume."""

    recipe: Recipe
    data: RunData
    run: Run


@contextmanager
def process_group() -> Iterator[None]:
    """The process group of a start by torchrun, for as long as the block lasts; nothing for a plain start."""
    if "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with heartbeat.run_heartbeat(_leave_group) as meeting:
        dist.init_process_group(
            backend, timeout=_NO_LIMIT, store=meeting.connection(), rank=meeting.rank, world_size=meeting.ranks
        )
        yield


def _leave_group() -> None:
    mesh.clear_mesh()
    if dist.is_initialized():
        dist.destroy_process_group()
    # gloo's threads need the interpreter to put down the last tensors; one that meets its end aborts the process
    time.sleep(0.1)


def choose_device(name: str) -> torch.device:
    """ "auto" takes a GPU where there is one; each local rank its own."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}", fix='use "cpu", "cuda" or "auto"')
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError('device = "cuda", but torch sees no GPU here', fix='--set device=cpu, or device = "auto"')
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank() % torch.cuda.device_count())


def prepare_run(
    recipe: Recipe, model: BuildModel | None = None, steps: int | None = None, quiet: bool = False
) -> PreparedRun:
    """Open the data and compose the run.

    `model` builds the plain model in place of the recipe's. `steps` is known when a run is resumed; otherwise the
    recipe's budget decides, a budget of seconds by timing some real steps.
    """
    device = choose_device(recipe.device)
    if ranks() > 1:
        mesh.set_mesh(mesh_sizes(recipe, ranks()), device.type)
    process_group_sync().run_first(lambda: open_examples(recipe, _unsaid if quiet else print_to_stderr) and None)
    objective, data = open_examples(recipe, _unsaid)  # prepared once, and told about, then opened by all

    def build() -> nn.Module:
        torch.manual_seed(recipe.seed)
        if model:
            return check_builder(model)
        return build_model_for(data.ends, recipe.model, recipe.seed, task=recipe.objective.name)

    plain = BaseRun(build, data.train, objective)
    steps = steps or _steps(recipe, plain, device, data.example_unit)
    return PreparedRun(recipe, data, compose(plain, recipe.techniques, steps, device))


def check_builder(build: BuildModel) -> nn.Module:
    """The model that a user's own function builds. Raises UsageError where the function fails, or gives none."""
    function = getattr(build, "func", build)  # what a partial calls
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', function)}"
    try:
        model = build()
    except (ThriftyError, MemoryError, torch.OutOfMemoryError):  # these say themselves what to do
        raise
    except Exception as error:
        raise UsageError(
            f"{name} builds no model: {type(error).__name__}: {error}",
            fix="mend it until it can be called without arguments, also more than once",
        ) from error
    if not isinstance(model, nn.Module):
        what = f"{name} gives a {type(model).__name__}, and no torch.nn.Module"
        raise UsageError(what, fix="return the model itself")
    return model


def open_examples(recipe: Recipe, say: Callable[[str], None] = print_to_stderr) -> tuple[Objective, RunData]:
    """The objective of a recipe, and the data that it makes its examples of; those held out are made already."""
    objective = chosen_objective(recipe.objective)
    if recipe.data.near_duplicates is not None and (
        objective.learns_from != "text" or isinstance(objective, ChatAnswers)
    ):
        raise UsageError(
            f"data.near_duplicates is set, which is for plain text, and {recipe.objective.name} learns from other data",
            fix="leave data.near_duplicates out",
        )
    if objective.learns_from == "pairs":
        data = open_image_pairs(recipe.data, recipe.seed, own_side(recipe.model), say)
        return objective, replace(data, held_out=data.held_out.shaped(objective.examples))
    if objective.learns_from == "images" and holds_images(recipe.data.source):
        side, patch, labelled = own_side(recipe.model), own_patch(recipe.model), objective.needs_labels
        objective, data = objective.with_patch_size(patch), open_images(recipe.data, recipe.seed, side, say, labelled)
        return objective, replace(data, held_out=data.held_out.shaped(objective.examples))
    _refuse_settings_of_images(recipe, objective)
    if isinstance(objective, ChatAnswers):
        return _open_conversations(recipe, objective, say)
    objective, data = _open_text(recipe, objective, say)
    return objective, replace(data, length=recipe.data.length)


def _refuse_settings_of_images(recipe: Recipe, objective: Objective) -> None:
    if set_in_vain := [name for name in ("size", "augment") if getattr(recipe.data, name) is not None]:
        from_text = objective.learns_from == "text"
        why = f"{recipe.objective.name} learns from text" if from_text else f"{recipe.data.source} holds none"
        raise UsageError(
            f"data.{set_in_vain[0]} is set, which is for images, and {why}", fix=f"leave data.{set_in_vain[0]} out"
        )


def _open_text(recipe: Recipe, objective: Objective, say: Callable[[str], None]) -> tuple[Objective, TextData]:
    settings = recipe.data
    if isinstance(objective, SequenceToSequence) and holds_pairs(settings.source):
        if set_in_vain := [name for name in ("rate", "mean_span") if getattr(recipe.objective, name) is not None]:
            raise UsageError(
                f"objective.{set_in_vain[0]} is set, and nothing is cut out of the pairs in {settings.source}",
                fix=f"leave objective.{set_in_vain[0]} out",
            )
        return objective, open_text(settings, recipe.seed, say, pairs=True)
    length = settings.length
    if settings.tokenizer:  # what it lacks should be known before a large text is prepared with it
        objective.with_tokenizer(read_tokenizer(Path(settings.tokenizer).expanduser()), length)
    settings = replace(settings, length=objective.text_length(length))
    data = open_text(settings, recipe.seed, say, objective.special_tokens(length))
    objective = objective.with_tokenizer(data.tokenizer, length)
    return objective, replace(data, held_out=data.held_out.shaped(objective.examples))


def _open_conversations(
    recipe: Recipe, objective: ChatAnswers, say: Callable[[str], None]
) -> tuple[Objective, TextData]:
    settings, model = recipe.data, recipe.model
    if model.folder and not settings.tokenizer:
        folder = Path(model.folder)
        named = entry_of_model(folder)
        if named is not None and not (folder / "config.json").is_file():
            raise UsageError(f"the model {named.name} is not on this machine yet", fix=f"thrifty data get {named.name}")
        settings = replace(settings, tokenizer=str(folder / "tokenizer.json"))
    learning = ChatLearningSettings(
        everything=objective.trained_on == "everything",
        by_tokens=objective.weigh_by == "tokens",
        together=objective.packed,
        template=objective.template,
    )
    return objective, replace(open_instructions(settings, recipe.seed, learning, say), length=settings.length)


def _unsaid(text: str) -> None:
    pass


def mesh_sizes(recipe: Recipe, count: int) -> dict[str, int]:
    """How many of so many ranks lie along each axis of the recipe's mesh; raises UsageError where no technique would
    use an axis."""
    claims = {claim for technique in recipe.techniques for claim in technique.claims}
    sizes = recipe.mesh.sizes(count, sharded=Claim.PARAMETER_SHARDING in claims)
    for axis, (claim, technique) in mesh.USED_BY.items():
        if sizes[axis] > 1 and claim not in claims:
            raise UsageError(
                f"there are {count} ranks, and no technique of the recipe divides the work among the {sizes[axis]} "
                f"along the {axis} axis",
                fix=f"--with {technique}, or start fewer processes",
            )
    return sizes


def _steps(recipe: Recipe, plain: BaseRun, device: torch.device, example_unit: int) -> int:
    """The number of steps that the budget pays for, each example going as so many tokens; raises Infeasible when it is
    none."""
    budget = recipe.budget
    if budget.steps is not None:
        return budget.steps
    if budget.seconds is not None:
        return _steps_in_seconds(budget.seconds, recipe, plain, device)
    if budget.tokens is None:
        raise UsageError("the recipe has no budget", fix="--budget 10min, --budget 500steps or --budget 1e7tokens")
    batch = _sizes_fixed(recipe, plain, device).source.batch
    per_step = batch * mesh.axis("data").size * example_unit  # some techniques look at more than they train on
    if budget.tokens < per_step:
        raise InfeasibleError(
            f"a budget of {budget.tokens:,.0f} tokens does not fit one step of {per_step:,}",
            fix=f"--budget {per_step}tokens or more, or a smaller data.batch",
        )
    return _steps_in_tokens(budget.tokens, per_step, recipe, plain, device)


def _sizes_fixed(recipe: Recipe, plain: BaseRun, device: torch.device) -> Run:
    """The run in batches that are all of one size."""
    fixed = [technique for technique in recipe.techniques if technique.stage is not Stage.RESIZE]
    return compose(plain, fixed, 1, device)


def _steps_in_tokens(budget: float, per_step: int, recipe: Recipe, plain: BaseRun, device: torch.device) -> int:
    """The most steps that go through no more than so many tokens, a step of the largest batch through `per_step`."""
    fixed = _sizes_fixed(recipe, plain, device)
    if len(fixed.techniques) == len(recipe.techniques):
        return int(budget // per_step)
    batch = fixed.source.batch

    def spent(steps: int) -> float:
        source = compose(plain, recipe.techniques, steps, device).source  # how fast batches grow may depend on steps
        return per_step * sum(source.size(step) for step in range(steps)) / batch

    most = 1
    while spent(2 * most) <= budget:
        most *= 2
    return most + bisect_right(range(most + 1, 2 * most), budget, key=spent)


def _steps_in_seconds(budget: float, recipe: Recipe, plain: BaseRun, device: torch.device) -> int:
    """Times a few real steps at the run's full structure, thrown away afterwards; what that takes is part of the
    budget."""
    began = time.monotonic()
    run = compose(plain, recipe.techniques, 1000, device)
    state = run.init_state()
    assert state.model is not None and state.optimizer is not None
    seconds = []
    with deterministic_kernels(device, recipe.deterministic):
        for step in range(run.steps - PROBED, run.steps):
            start = time.monotonic()
            run.backward(state.model, run.objective, run.source.at(step).to(device)).loss.item()
            state.optimizer.step()
            state.optimizer.zero_grad()
            seconds.append(time.monotonic() - start)
    step = statistics.median(seconds[2:])
    spent = time.monotonic() - began
    steps = process_group_sync().run_first(lambda: math.floor((budget - spent) / step))
    if steps < 1:
        raise InfeasibleError(
            f"a budget of {budget:g} s does not fit one step: starting takes {spent:.1f} s and a step {step:.2f} s",
            fix=f"--budget {math.ceil(spent + 10 * step)}s or more",
        )
    return steps
