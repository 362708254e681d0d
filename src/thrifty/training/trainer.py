"""Start, resume, fork and rewind runs.

This module connects data, models, techniques and training. The command line calls this module.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from thrifty.composition.compose import refuse_trained_start
from thrifty.core.errors import IntegrityError, UsageError, for_reader
from thrifty.core.old_names import rename_origins
from thrifty.core.plain_values import differences, read_extension
from thrifty.core.randomness import draws_of_caller
from thrifty.core.ranks import rank
from thrifty.core.recipe import Budget, Recipe
from thrifty.core.stages import Stage
from thrifty.core.state import TrainState, read_log
from thrifty.core.user_sources import reference
from thrifty.recipes.data_parallelism import with_data_parallelism
from thrifty.recipes.recipe_toml import read_recipe, recipe_from_data, recipe_to_data
from thrifty.recipes.short_budgets import without_slow_start
from thrifty.training import checkpoint, checkpoint_index
from thrifty.training.budget_extension import extend
from thrifty.training.judged_measure import reason_to_stop
from thrifty.training.progress_display import ProgressDisplay
from thrifty.training.rank_setup import ranks_of
from thrifty.training.rank_sync import process_group_sync
from thrifty.training.rendezvous import current_agent
from thrifty.training.run_folder import RunFolder
from thrifty.training.run_fork import copy_matching_state
from thrifty.training.run_setup import prepare_run
from thrifty.training.session_start import run_session, stored_json
from thrifty.training.state_loading import load_state
from thrifty.training.time_budget import RunLength
from thrifty.training.train_session import Observer, Steps

FREE_TO_CHANGE = ("name", "about", "deterministic", "evaluation", "checkpoints", "mesh")
"""Recipe sections that a resumed run may change, because they do not affect the computation. Metrics may change too."""


@contextmanager
def claim_run_folder(path: Path, claim: Callable[[Path, Collection[str]], RunFolder]) -> Iterator[RunFolder]:
    """Yield the run folder. Rank 0 creates or opens and locks the folder. An error on rank 0 is raised on every
    rank."""
    folders: list[RunFolder] = []
    agents = set(process_group_sync().gather_or_raise(current_agent)) - {""}
    process_group_sync().run_first(lambda: folders.append(claim(path, agents)))
    claimed = process_group_sync().run_first(lambda: str(folders[0].path))
    folder = folders[0] if folders else RunFolder(Path(claimed))
    folder.again = process_group_sync().run_first(lambda: folder.again)
    with folder:
        yield folder


def train(recipe: Recipe, runs: Path = Path("runs"), **options: Any) -> dict[str, Any]:
    """Train a recipe in runs/NAME and return the summary; see `train_steps`."""
    return _end_of(train_steps(recipe, runs, **options), recipe)


def _end_of(steps: Steps, recipe: Recipe) -> dict[str, Any]:
    with draws_of_caller(recipe.device):
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value


def draws_apart(steps: Steps, recipe: Recipe) -> Steps:
    """Yield the records of `steps`. The caller's random numbers depend neither on the run nor on its seed."""
    try:
        while True:
            with draws_of_caller(recipe.device):
                try:
                    record = next(steps)
                except StopIteration as end:
                    return end.value
            yield record
    finally:
        steps.close()


def train_steps(
    recipe: Recipe,
    runs: Path = Path("runs"),
    *,
    numbered: bool = False,
    origins: Mapping[str, str] | None = None,
    observers: Sequence[Observer] = (),
    quiet: bool = False,
    counted: Mapping[str, Any] | None = None,
) -> Steps:
    """Train a recipe in runs/NAME and yield one record per step. If the folder exists, raise UsageError, or with
    `numbered` use NAME-2, NAME-3 and so on. A restart of the same job by torchrun resumes the run instead. Without a
    custom loss, a user's model maps token ids (b, t) to logits. A user's model with a list of blocks and a
    linear `head` maps token ids to hidden states (b, t, width). `counted` is the result of `counted_facts` for a recipe
    that differs only in seed, budget and learning rate; on the same machine, the run does not count again."""
    claimed = claim_run_folder(Path(runs) / recipe.name, RunFolder.create_numbered if numbered else RunFolder.create)
    with ranks_of(recipe), claimed as folder, ProgressDisplay(quiet) as display:
        if folder.name != recipe.name:
            display.say(f"'{Path(runs) / recipe.name}' exists already, so the name of this run is '{folder.name}'")
        recipe = replace(with_data_parallelism(recipe), name=folder.name)
        recipe = without_slow_start(recipe, display.say)
        if process_group_sync().run_first(folder.recipe.is_file):
            return (yield from _resume(folder, recipe, origins or {}, display, observers))
        prepared = prepare_run(recipe, quiet=quiet, phase=display.phase)
        return (yield from run_session(prepared, folder, display, origins or {}, observers, counted=counted))


def resume(folder: Path, recipe: Recipe, **options: Any) -> dict[str, Any]:
    """Resume a run to its end and return the summary; see `resume_steps`."""
    return _end_of(resume_steps(folder, recipe, **options), recipe)


def resume_steps(
    folder: Path,
    recipe: Recipe,
    *,
    budget: str | None = None,
    fork: str | None = None,
    drop_weights: bool = False,
    origins: Mapping[str, str] | None = None,
    observers: Sequence[Observer] = (),
    quiet: bool = False,
) -> Steps:
    """Resume from the newest undamaged checkpoint of a run folder, or from the first step if it has none.

    The recipe must equal the recipe of the run's start; otherwise UsageError reports the differences. With `fork` the
    run continues as a new run of that name with the changed recipe. Matching state is copied. Other state starts fresh
    or is left out, and a notice reports both. Weights are left out only with `drop_weights`. `origins` are the sources
    of changed values. `budget` extends the budget of the run, such as "+10min", also after its end.
    """
    if budget is not None:
        read_extension(budget)
        if fork is not None:
            raise UsageError(
                f"--budget {budget} extends the run itself, but --fork starts the new run {fork!r}",
                fix="--set budget.steps=1000, counted from the first step, in place of --budget",
            )
    with ranks_of(recipe), ProgressDisplay(quiet) as display:
        recipe = with_data_parallelism(recipe)
        if fork is not None:
            changed, target = replace(recipe, name=fork), folder.parent / fork
            return (
                yield from _fork(folder, changed, target, origins or {}, display, observers, drop_weights=drop_weights)
            )
        with claim_run_folder(folder, lambda path, agents: RunFolder.open(path).lock(agents)) as opened:
            return (yield from _resume(opened, recipe, origins or {}, display, observers, budget))


def rewind_run(
    folder: Path,
    step: int,
    recipe: Recipe,
    *,
    origins: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Start a new run from an old run's checkpoint of `step`, with the masks of the new recipe. Weights, optimizer,
    data order and schedule continue from `step`. If the new run was interrupted, resume it."""
    with ranks_of(recipe), ProgressDisplay(quiet) as display:
        target = folder.parent / recipe.name
        return _end_of(_fork(folder, recipe, target, origins or {}, display, rewound_to=step), recipe)


def _resume(
    folder: RunFolder,
    recipe: Recipe,
    origins: Mapping[str, str],
    display: ProgressDisplay,
    observers: Sequence[Observer],
    extension: str | None = None,
) -> Steps:
    recipe.refuse_missing_objects()
    saved = _newest(folder)
    started = recipe_from_data(saved.scalars["recipe"]) if saved else read_recipe(folder.recipe)
    later = process_group_sync().run_first(lambda: folder.read_later_records(saved.step) if saved else [])
    recorded = {record["step"]: record for record in later if record["kind"] == "length"}
    for record in recorded.values():  # a budget that was extended after the checkpoint
        if "extended" in record:
            started = replace(started, budget=Budget(**record["extended"]))
    if not any(technique.stage is Stage.COMPILE for technique in started.techniques):
        recipe = without_slow_start(recipe, display.say)  # as the start did; a fork is compiled at any budget
    if refused := _changes(_binding(started), _binding(recipe, started)):
        raise UsageError(
            "the recipe is not the one this run was started with: " + "; ".join(refused),
            fix=f"undo the change; or continue as a new run: {recipe.resume_line(folder.path, fork='NAME')}",
        )
    if saved is None and extension:
        raise UsageError(
            f"'{folder.path}' has no checkpoint, so its budget cannot be extended by {extension!r}",
            fix=recipe.resume_line(folder.path),
        )
    if saved is None:
        again = [f"'{folder.path}' ended before its first checkpoint: restarted from the first step"]
        prepared = prepare_run(recipe, quiet=display.quiet, phase=display.phase)
        return (yield from run_session(prepared, folder, display, origins, observers, fill=lambda state: again))
    lengths = [RunLength(*length) for length in saved.scalars.get("lengths", ())]  # earlier versions had one
    lengths = lengths or [RunLength(0, saved.scalars["steps"])]
    if saved.step in recorded:
        lengths.append(RunLength(saved.step, recorded[saved.step]["steps"]))
    early = reason_to_stop(recipe.evaluation, saved.scalars["counters"])
    is_at_end = saved.step >= lengths[-1].steps or early
    if is_at_end and (summary := stored_json(folder, "summary")).get("status") == "finished":
        if folder.again:  # a rank was lost after the end
            return summary
        if early or not extension:
            why = f"it stopped early, because {early}" if early else f"it made all its {saved.step} steps"
            more = recipe.resume_line(folder.path, budget=f"+{saved.step}steps")
            new = recipe.resume_line(folder.path, fork="NAME")
            longer = for_reader(f" --set budget.steps={2 * saved.step}") if early else ""
            fix = f"continue it as a new run: {new}{longer}" + ("" if early else f"; or train longer: {more}")
            raise UsageError(f"'{folder.path}' is finished: {why}", fix)

    def fill(state: TrainState) -> list[str]:
        load_state(state, saved, process_group_sync())
        prepared.run.plain.source.load_state(saved.scalars.get("source", {}))
        sealed = saved.scalars.get("records") if rank() == 0 else None  # checkpoints of earlier versions have none
        return [*saved.notices, *(folder.damage_of_records(sealed) if sealed else [])]

    prepared = prepare_run(recipe, lengths[0].steps, display.quiet, display.phase, folder.path)
    for length in lengths[1:]:
        prepared.run.change_length(length.steps, length.step)
    if other := [name for name, sha256 in saved.scalars["data"].items() if prepared.data.identity.get(name) != sha256]:
        source = repr(recipe.data.source) if recipe.data.source else "the data set"
        raise IntegrityError(
            f"{source} is not what this run was trained on: {' and '.join(sorted(other))} differ",
            fix="restore the old data; or start a new run on the new data",
        )
    if extension:
        amount, before = read_extension(extension), prepared.run.steps
        counters = saved.scalars["counters"]
        budget, steps = extend(recipe.budget, amount, saved.step, before, counters, prepared.steps_within)
        prepared.run.change_length(steps, saved.step)
        prepared = replace(prepared, recipe=replace(recipe, budget=budget))
        lengths.append(RunLength(saved.step, steps))
        table = {name: value for name, value in asdict(budget).items() if value is not None}
        change = {"kind": "length", "step": saved.step, "steps": steps, "asked": extension, "extended": table}
        recorded[saved.step] = change
        origins = {**origins, f"budget.{next(iter(table))}": f"--budget {extension}"}
        display.say(
            f"budget extended by {extension.lstrip('+')} after step {saved.step:,}: {steps:,} steps in place of "
            f"{before:,}, and schedules follow the new length"
        )
    log = read_log(saved.scalars)
    return (yield from run_session(prepared, folder, display, origins, observers, log, fill, lengths, recorded))


def _binding(recipe: Recipe, started: Recipe | None = None) -> dict[str, Any]:
    """Return the parts of a recipe that a resume may not change. Sections in `FREE_TO_CHANGE` and techniques that
    divide the work among ranks are excluded. Data whose class has the name that the `started` recipe recorded have this
    name: a run from Python records the class, and a command names a function or a variable."""
    techniques = tuple(technique for technique in recipe.techniques if not technique.divides_ranks)
    data = recipe_to_data(replace(recipe, techniques=techniques))
    for name in ("data", "held_out") if started else ():
        passed, recorded = getattr(recipe.objects, name), getattr(started.python, name)
        if passed is not None and reference(passed) == recorded:
            data["python"][name] = recorded
            data["python"]["sources"].pop(recipe.objects.names.get(name), None)  # makes the data set, as the caller did
    return {name: section for name, section in data.items() if name not in FREE_TO_CHANGE}


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between the binding parts of two recipes, in words. Metrics are not binding."""
    tables = [recipe.get("python", {}) for recipe in (before, now)]
    of_metrics = {name for table in tables for name in table.pop("metric_sources", {})}
    old, new = (table.pop("sources", {}) for table in tables)
    for table in tables:
        table.pop("metrics", None)
    old = {name: value for name, value in old.items() if name in new or name not in of_metrics}
    edited = {name for name in old.keys() & new.keys() if old[name] != new[name]}
    other = [line.removeprefix("python.") for line in differences(before, now)]
    if not other:  # a function of another name has another source
        edited |= old.keys() ^ new.keys()
    return [*other, *(f"the source of {name} has changed" for name in sorted(edited))]


def _newest(folder: RunFolder) -> checkpoint.FoundCheckpoint | None:
    """Return the newest undamaged checkpoint; None if the run ended before its first checkpoint."""
    try:
        return checkpoint.find_of_run(folder.checkpoints, ranks=process_group_sync())
    except IntegrityError:
        if process_group_sync().run_first(lambda: len(checkpoint_index.checkpoints(folder.checkpoints))):
            raise
        return None


def _fork(
    old: Path,
    recipe: Recipe,
    target: Path,
    origins: Mapping[str, str],
    display: ProgressDisplay,
    observers: Sequence[Observer] = (),
    rewound_to: int | None = None,
    drop_weights: bool = False,
) -> Steps:
    saved = checkpoint.find_of_run(old / "checkpoints", rewound_to, ranks=process_group_sync())

    started = recipe_from_data(saved.scalars["recipe"])

    def fill(state: TrainState) -> list[str]:
        rewound = rewound_to is not None
        notices = copy_matching_state(prepared.run, state, saved, rewound=rewound, drop_weights=drop_weights)
        if recipe.data.batch != started.data.batch:
            notices.append(
                f"the data continue at example {saved.step * recipe.data.batch:,}, which is step {saved.step} in "
                f"batches of {recipe.data.batch}; in batches of {started.data.batch} {old} had reached example "
                f"{saved.step * started.data.batch:,}"
            )
        return notices

    with claim_run_folder(target, RunFolder.create if rewound_to is None else _opened_or_created) as folder:
        if process_group_sync().run_first(lambda: bool(checkpoint_index.checkpoints(folder.checkpoints))):
            return (yield from _resume(folder, recipe, origins, display, observers))
        prepared = prepare_run(recipe, quiet=display.quiet, phase=display.phase, before=old)
        if prepared.run.steps <= saved.step:
            raise UsageError(
                f"the budget of {prepared.run.steps} steps is used up: '{old}' has made {saved.step}",
                fix=f"--set budget.steps={2 * saved.step}, counted from the first step of {old.name}",
            )
        known = {technique.name for technique in started.techniques}
        refuse_trained_start([technique for technique in prepared.run.techniques if technique.name not in known])
        prepared.data.check_meaning(saved.scalars["data"], old)
        inherited = {**rename_origins(stored_json(RunFolder(old), "origins")), **origins}
        return (yield from run_session(prepared, folder, display, inherited, observers, read_log(saved.scalars), fill))


def _opened_or_created(path: Path, agents: Collection[str]) -> RunFolder:
    return RunFolder.open(path).lock(agents) if (path / "recipe.toml").is_file() else RunFolder.create(path, agents)
