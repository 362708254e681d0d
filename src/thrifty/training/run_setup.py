"""Setup of a run from a recipe: processes, device, data, number of steps."""

import math
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thrifty.composition.compose import BaseRun, Run, compose
from thrifty.composition.index_check import refuse_indices_without_row
from thrifty.core import mesh
from thrifty.core.batches import Batch
from thrifty.core.claims import Claim
from thrifty.core.errors import STARTED, InfeasibleError, UsageError, refuse_unknown, spelled
from thrifty.core.model_spec import TextModelSpec
from thrifty.core.objective import Objective
from thrifty.core.out_of_memory import explain_out_of_memory
from thrifty.core.ranks import rank, ranks
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.stages import Stage
from thrifty.data.catalogue import refuse_model_to_be_fetched
from thrifty.data.chat.chat_data import Chats
from thrifty.data.data_kind import DataKind, DataRequest, refuse_other_data
from thrifty.data.images.image_data import Images
from thrifty.data.pairs.pair_data import ImagesWithCaptions
from thrifty.data.run_data import RunData
from thrifty.data.text.labelled_data import LabelledTexts, has_texts
from thrifty.data.text.text_data import PairsOfTexts, PlainText, print_to_stderr
from thrifty.data.user_data import open_user_data
from thrifty.models import build_model_for, check_model, folder_config, own_sizes
from thrifty.objectives import chosen_objective
from thrifty.objectives.labelled_text import HAS_SCORES
from thrifty.objectives.user_loss import UserLoss, loss_of_output
from thrifty.training import heartbeat
from thrifty.training.determinism import deterministic_kernels
from thrifty.training.rank_sync import process_group_sync
from thrifty.training.rendezvous import take_srun_ranks

DATA_KINDS: dict[str, DataKind] = {
    kind.name: kind for kind in (ImagesWithCaptions(), Images(), Chats(), LabelledTexts(), PairsOfTexts(), PlainText())
}
"""Kinds of data by name, the most special first."""

PROBED = 6
"""Number of timed steps that convert a budget of seconds to steps. The first two steps are excluded from the
average."""

EXAMPLES, MOST_BATCHES, LOOKING = 16, 64, 0.2
"""Limits of the search for an index without an embedding row: examples per batch, batches per epoch, seconds."""

_NO_LIMIT = timedelta(days=30)
"""Timeout of a collective. The heartbeat detects hanging ranks, and ranks may wait for hours while one rank prepares
text."""


@dataclass(frozen=True)
class PreparedRun:
    """A recipe with opened data and composed techniques, ready to start or to resume."""

    recipe: Recipe
    data: RunData
    run: Run
    began: float = field(default_factory=time.monotonic)
    """Time of the start, in seconds of time.monotonic()."""
    step_seconds: float = 0.0
    """Measured seconds of a step in the run's final structure; 0 if it was not measured."""

    @property
    def unit(self) -> str:
        """Unit of examples, such as tokens or images."""
        return self.data.facts.get("unit", "tokens")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of data and loss that the summary repeats."""
        facts, loss_in = dict(self.data.facts), self.run.plain.objective.loss_in
        if self.recipe.objective.name != "next_token" and "bytes_per_token" in facts:
            # only next-token prediction measures how far the text can be compressed
            facts["bytes_per_token"] = None
        return facts | ({"loss_in": loss_in} if loss_in != "nats" else {})

    @property
    def recipe_in_steps(self) -> Recipe:
        """The recipe with a budget in epochs converted to steps."""
        if self.recipe.budget.epochs is None:
            return self.recipe
        return replace(self.recipe, budget=Budget(steps=self.steps_within(self.recipe.budget)))

    def steps_within(self, budget: Budget) -> int:
        """Return the number of steps that a budget in steps, tokens or epochs allows."""
        return _steps(replace(self.recipe, budget=budget), self.run.plain, self.run.device, self.data)


@contextmanager
def process_group() -> Iterator[None]:
    """Open the process group inside the context if torchrun or srun started this process; do nothing for a single
    process. Raise OutOfMemory in place of an allocator's error."""
    take_srun_ranks()
    if "RANK" not in os.environ or dist.is_initialized():
        with explain_out_of_memory():
            yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with heartbeat.run_heartbeat(_leave_group) as meeting:
        dist.init_process_group(
            backend, timeout=_NO_LIMIT, store=meeting.connection(), rank=meeting.rank, world_size=meeting.ranks
        )
        with explain_out_of_memory():
            yield


@contextmanager
def ranks_of(recipe: Recipe) -> Iterator[None]:
    """Open the process group for a recipe's mesh. Raise UsageError if there are too few ranks."""
    with process_group():
        if ranks() < (least := recipe.mesh.least_ranks):
            alone = ",".join(f"{name}=1" for name, size in vars(recipe.mesh).items() if size > 1)
            raise UsageError(
                f"the mesh of {recipe.mesh.label} requires {least} ranks, and this start has {ranks()}",
                fix=spelled(
                    f"--ranks {least}; or torchrun --nproc-per-node {least} -m thrifty …; or use --mesh {alone}",
                    f"ranks={least}; or torchrun --nproc-per-node {least} script.py",
                ),
            )
        yield


def _leave_group() -> None:
    mesh.clear_mesh()
    if dist.is_initialized():
        dist.destroy_process_group()
    # gloo's threads need the interpreter to free the last tensors; after its shutdown they would abort the process
    time.sleep(0.1)


def choose_device(name: str) -> torch.device:
    """Return the device of this rank. "auto" selects a CUDA GPU if there is one. Each local rank has its own GPU."""
    if name.startswith(("gpu", "cuda:")):
        raise UsageError(f"unknown device {name!r}", fix="--device cuda")
    refuse_unknown("unknown device", name, ("auto", "cpu", "cuda", "mps"))
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch finds no GPU on this machine", fix="--device cpu")
    if name == "mps":
        if not torch.backends.mps.is_available():
            fix = "--set device=cpu; or --set device=auto"
            raise UsageError('device = "mps", but torch finds no GPU of an Apple chip', fix)
        if ranks() > 1:
            what = f"device = \"mps\" allows '1' rank, and this start has {ranks()}"
            raise UsageError(what, fix="start one process; or --set device=cpu")
        return torch.device("mps")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank() % torch.cuda.device_count())


def _ignore(text: str) -> None:
    pass


def prepare_run(
    recipe: Recipe, steps: int | None = None, quiet: bool = False, phase: Callable[[str], None] = _ignore
) -> PreparedRun:
    """Open the data and compose the run. Raise UsageError if an object that the recipe names was not passed. `steps` is
    the number of steps of a resumed run; by default the recipe's budget determines it. For a budget in seconds, some
    real steps are timed. `phase` is called with a text at the start of each phase."""
    began = _command_start()
    recipe.refuse_missing_objects()
    device, model = choose_device(recipe.device), recipe.objects.model
    chosen_objective(recipe.objective)
    if model is None:  # checked before the data, whose preparation may take long
        refuse_model_to_be_fetched(Path(recipe.model.folder))
        if recipe.objects.data is None:
            check_model(recipe.model, recipe.objective.name)
    if ranks() > 1:
        mesh.set_mesh(mesh_sizes(recipe, ranks()), device.type)
    phase("opening the data")
    objective, data = _open_first_on_rank_0(recipe, _ignore if quiet else print_to_stderr)

    def build() -> nn.Module:
        torch.manual_seed(recipe.seed)
        if model is not None:
            return recipe.objects.build_model(recipe.model.arguments)
        return build_model_for(data.ends, recipe.model, recipe.seed, task=recipe.objective.name)

    is_folder = model is None and bool(recipe.model.folder) and not recipe.model.reinitialize
    is_trained = is_folder or isinstance(model, nn.Module)
    plain = BaseRun(build, data.train, objective, is_trained)
    if model is not None or recipe.objects.data is not None:  # otherwise the model is built for the data
        process_group_sync().run_first(
            lambda: refuse_indices_without_row(plain, _batches_to_check(recipe, data, objective))
        )
    budget, step_seconds = recipe.budget, 0.0
    steps = steps or budget.estimate
    if steps is None and budget.seconds is not None:
        phase("timing some steps")
        step_seconds = _time_step(recipe, plain, device)
        steps = _steps_in_seconds(budget, began, step_seconds)
    steps = steps or _steps(recipe, plain, device, data)
    run = compose(plain, recipe.techniques, steps, device)
    measures = ("loss", *run.eval_objective.metrics)
    refuse_unknown("evaluation.judge names no measure of this run:", recipe.evaluation.judge, measures)
    return PreparedRun(recipe, data, run, began, step_seconds)


def _command_start() -> float:
    """Return the start of the command in seconds of time.monotonic(). For later runs of a process, and for calls from
    Python, return the time now."""
    now = time.monotonic()
    return min(float(os.environ.pop(STARTED, now)), now)


def _batches_to_check(recipe: Recipe, data: RunData, objective: Objective) -> Iterator[Batch]:
    """Yield batches for the search for an index without an embedding row. The held-out examples that evaluations use
    come first, then training examples spread over an epoch. Each part takes at most LOOKING seconds."""
    yield from _until_time_limit(data.held_out.batches(recipe.evaluation.examples, EXAMPLES))
    source = data.train
    epoch = -(-source.examples // source.batch) if source.examples else 1
    rows, steps = min(source.batch, EXAMPLES), range(0, epoch, -(-epoch // MOST_BATCHES))
    for batch in _until_time_limit(source.rows(step, 0, rows) for step in steps):
        if isinstance(data.ends, TextModelSpec) and "tokens" in batch.fields:  # the largest token may be rare
            batch["tokens"][0, [0, -1]] = data.ends.vocabulary - 1
        yield objective.examples(batch)


def _until_time_limit(batches: Iterable[Batch]) -> Iterator[Batch]:
    began = time.monotonic()
    for batch in batches:
        yield batch
        if time.monotonic() - began > LOOKING:
            return


def open_examples(recipe: Recipe, say: Callable[[str], None] = print_to_stderr) -> tuple[Objective, RunData]:
    """Return the objective and the data of a recipe, with all held-out examples."""
    recipe.refuse_missing_objects("data", "held_out", "loss", "collate", "metrics")
    settings, objective = recipe.data, chosen_objective(recipe.objective)
    kinds = [DATA_KINDS[name] for name in objective.learns_from]
    for name in ("near_duplicates", "sources", "separate"):
        if getattr(settings, name) not in (None, False, {}) and name not in kinds[0].own_settings:
            raise UsageError(
                f"data.{name} is only for plain text, but {recipe.objective.name} learns from other data",
                fix=f"leave data.{name} out",
            )
    is_passed = recipe.objects.data is not None
    if not (settings.source.strip() or settings.sources or is_passed):  # for example, a shell variable that is not set
        raise UsageError(
            f"the recipe {recipe.name!r} has no data to train on",
            fix="--data my.txt, which may be a file, a folder or a dataset name, such as --data python-stdlib",
        )
    if not is_passed:
        fitting = [each for each in kinds if each.is_visual == _sees_images(recipe)]
        refuse_other_data(recipe, fitting or kinds, DATA_KINDS.values())
    kind = kinds[-1] if is_passed else next((each for each in kinds if each.holds(settings)), kinds[-1])
    if settings.sources or settings.separate:  # settings of plain text
        kind = kinds[0]
    for name in ("size", "augment"):
        if getattr(settings, name) is not None and name not in kind.own_settings:
            from_text = f"{recipe.objective.name} learns from text"
            why = f"'{settings.source}' contains none" if objective.sees_images else from_text
            raise UsageError(f"data.{name} is only for images, but {why}", fix=f"leave data.{name} out")
    for name in ("pair_column", "label_column", "held_out_source"):
        if getattr(settings, name) and name not in kind.own_settings:
            kinds_of_text = "texts" if name == "held_out_source" else "labelled texts"
            raise UsageError(
                f"data.{name} is only for {kinds_of_text}, but {recipe.objective.name} learns from other data",
                fix=f"leave data.{name} out; or --set objective.name=classification; or objective.name=regression",
            )
    if kind.name == "labelled_text" and objective.label_form != "number" and not HAS_SCORES:
        say("accuracy is the only metric: F1 needs scikit-learn (pip install 'thrifty[metrics]')")
    own = partial(own_sizes, recipe.model), say, partial(folder_config, recipe.model)
    return kind.open(DataRequest(recipe, objective, *own))


def _sees_images(recipe: Recipe) -> bool | None:
    """Return True if the inputs of the recipe's model are images; None if this is unknown."""
    with suppress(UsageError):  # an invalid model, or one that only transformers knows
        return None if recipe.model.build else own_sizes(recipe.model)[1] is not None
    return None


def _open_first_on_rank_0(recipe: Recipe, say: Callable[[str], None]) -> tuple[Objective, RunData]:
    """Open the data on rank 0, then on the remaining ranks. Rank 0 prepares the data and reports missing parts."""
    objects = recipe.objects

    def opened_by(say: Callable[[str], None]) -> tuple[Objective, RunData]:
        is_labelled = "labelled_text" in chosen_objective(recipe.objective).learns_from and objects.loss is None
        if objects.data is None or (is_labelled and has_texts(objects.data)):
            if objects.metrics and not objects.loss:
                raise UsageError(
                    f"metrics= was passed, but the objective {recipe.objective.name} has its own metrics",
                    fix="leave metrics out; or pass loss=, a function of (model, batch)",
                )
            objective, data = open_examples(recipe, say)
            own = UserLoss(objects.loss, _fields, objects.metrics, data.example_unit) if objects.loss else objective
            return own, data
        settings = recipe.data
        judged = recipe.evaluation.examples
        data = open_user_data(objects.data, objects.held_out, settings.batch, recipe.seed, objects.collate, judged)
        return UserLoss(objects.loss or loss_of_output, data.assembled, objects.metrics), data

    opened: list[tuple[Objective, RunData]] = []
    process_group_sync().run_first(lambda: opened.append(opened_by(say)))
    return opened[0] if opened else opened_by(_ignore)


def _fields(batch: Batch) -> dict[str, Tensor]:
    return dict(batch.fields)


def mesh_sizes(recipe: Recipe, count: int) -> dict[str, int]:
    """Return the number of ranks along each axis of the recipe's mesh. Raise UsageError if no technique uses an
    axis."""
    claims = {claim for technique in recipe.techniques for claim in technique.claims}
    sizes = recipe.mesh.sizes(count, sharded=Claim.PARAMETER_SHARDING in claims)
    for axis, (claim, technique) in mesh.USED_BY.items():
        if sizes[axis] > 1 and claim not in claims:
            raise UsageError(
                f"there are {count} ranks, but no technique of the recipe divides the work among the {sizes[axis]} "
                f"along the {axis} axis",
                fix=f"--with {technique}; or start fewer processes",
            )
    return sizes


def _steps(recipe: Recipe, plain: BaseRun, device: torch.device, data: RunData) -> int:
    """Return the number of steps that the budget allows. Raise InfeasibleError if the budget allows no step."""
    budget = recipe.budget
    if budget.steps is not None:
        return budget.steps
    source = _with_fixed_batch(recipe, plain, device).source
    # some techniques read more examples than they train on
    per_step = source.batch * mesh.axis("data").size * data.example_unit
    if budget.epochs is not None:
        whole = budget.in_epochs_of(source.examples and source.examples * data.example_unit)
        return 1 + _steps_in_tokens(whole - 1, per_step, recipe, plain, device)  # the fewest that cover all examples
    if budget.tokens is None:
        raise UsageError("the recipe has no budget", fix="--budget 10min; or --budget 500steps; or --budget 1e7tokens")
    if budget.tokens < per_step:
        unit = data.facts.get("unit", "tokens")
        raise InfeasibleError(
            f"a budget of {budget.tokens:,.0f} {unit} is less than one step of {per_step:,}",
            fix=f"--budget {per_step}tokens or more; or a smaller data.batch",
        )
    return _steps_in_tokens(budget.tokens, per_step, recipe, plain, device)


def _with_fixed_batch(recipe: Recipe, plain: BaseRun, device: torch.device) -> Run:
    """Return the run without techniques that change the batch size."""
    fixed = [technique for technique in recipe.techniques if technique.stage is not Stage.RESIZE]
    return compose(plain, fixed, 1, device)


def _steps_in_tokens(budget: float, per_step: int, recipe: Recipe, plain: BaseRun, device: torch.device) -> int:
    """Return the maximum number of steps within a token budget. A step of the largest batch uses `per_step` tokens."""
    fixed = _with_fixed_batch(recipe, plain, device)
    if len(fixed.techniques) == len(recipe.techniques):
        return int(budget // per_step)
    batch = fixed.source.batch

    def spent(steps: int) -> float:
        source = compose(plain, recipe.techniques, steps, device).source  # the growth of batches may depend on steps
        return per_step * sum(source.size(step) for step in range(steps)) / batch

    most = 1
    while spent(2 * most) <= budget:
        most *= 2
    return most + bisect_right(range(most + 1, 2 * most), budget, key=spent)


def _time_step(recipe: Recipe, plain: BaseRun, device: torch.device) -> float:
    """Return the measured seconds of a step. Some real steps with the run's final structure are made and discarded."""
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
    return process_group_sync().run_first(lambda: statistics.median(seconds[2:]))


def _steps_in_seconds(budget: Budget, began: float, step: float) -> int:
    """Return the first estimate of the number of steps within a time budget, for steps of `step` seconds."""
    assert budget.seconds is not None
    used = time.monotonic() - began if budget.counts == "run" else 0.0
    steps = process_group_sync().run_first(lambda: math.floor((budget.seconds - used) / step))
    if steps < 1:
        raise InfeasibleError(
            f"a budget of {budget.seconds:g} s is less than one step: the start takes {used:.1f} s, a step takes "
            f"{step:.2f} s",
            fix=f"--budget {math.ceil(used + 10 * step)}s or more",
        )
    return steps
